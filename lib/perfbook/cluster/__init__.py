"""Beyond one machine: the same campaign on a Ray cluster.

Ray schedules, carries and notices what died; perfbook says what a variant needs and brings its files home. Without
Ray installed nothing here is imported, and every other command works.
"""
