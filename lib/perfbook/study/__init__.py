"""One module per notebook question: measure through the desk, analyse with pure functions, record the answer."""
