"""Common English words, nearly all of them one token after a space in the usual vocabularies."""

from __future__ import annotations

_TEXT = """
able about above act add after again age ago air all almost along also always among amount animal answer
any appear apple area arm around art ask away baby back bad ball bank base bear beat beauty bed began
begin behind believe bell best better between big bird black block blood blow blue board boat body bone
book born both bottom box boy branch bread break bright bring broad brother brown build burn busy buy call
came camp capital captain car card care carry case cat catch cause cell center century certain chair
chance change character charge check chief child choose circle city claim class clean clear climb clock
close cloth cloud coast coat cold color column come common company compare complete condition consider
contain continue control cook cool copy corn corner correct cost cotton could count country course cover
cow create crop cross crowd cry current cut dance danger dark day dead deal dear death decide deep degree
depend describe desert design determine develop dictionary die differ direct discuss distant divide doctor
dog dollar done door double down draw dream dress drink drive drop dry during each ear early earth ease
east eat edge effect egg eight either electric element else end enemy energy engine enough enter equal
evening event ever every exact example except excite exercise expect experience experiment eye face fact
fair fall family famous far farm fast father favor fear feed feel feet fell felt few field fig fight
figure fill final find fine finger finish fire first fish fit five flat floor flow flower fly follow food
foot force forest form forward found four fraction free fresh friend front fruit full fun game garden gas
gather gave general gentle girl give glad glass gold gone good got govern grand grass gray great green
grew ground group grow guess guide gun hair half hand happen happy hard hat head hear heart heat heavy
held help high hill history hit hold hole home hope horse hot hour house how huge human hundred hunt hurry
ice idea imagine inch include indicate industry insect instant instrument interest invent iron island job
join joy jump just keep kept key kill kind king knew know lady lake land language large last late laugh
law lay lead learn least leave led left leg length less letter level lie life lift light like line liquid
list listen little live locate log lone long look lost lot loud love low machine made magnet main major
make man many map mark market mass master match material matter may mean measure meat meet melody men
metal method middle might mile milk million mind mine minute miss mix modern molecule moment money month
moon morning most mother motion mount mountain mouth move much multiply music must name nation natural
nature near necessary neck need neighbor never new next night nine noise noon north nose note nothing
notice noun number object observe occur ocean offer office often oil old once one only open operate
opposite order organ original other own oxygen page paint pair paper paragraph parent part party pass past
path pattern pay people perhaps period person phrase pick picture piece pitch place plain plan plane
planet plant play please plural poem point poor populate port pose position possible post pound power
practice prepare present press pretty print problem process produce product proper property protect prove
provide pull push put quart question quick quiet quite race radio rail rain raise ran range rather reach
read ready real reason receive record red region remember repeat reply represent require rest result rich
ride right ring rise river road rock roll room root rope rose round row rub rule run safe said sail salt
same sand save say scale school science score sea search season seat second section see seed seem segment
select self sell send sense sentence separate serve set settle seven several shape share sharp sheet shell
shine ship shoe shop shore short shoulder shout show side sight sign silent silver similar simple since
sing single sister sit six size skill skin sky sleep slip slow small smell smile snow soft soil soldier
solution solve some song soon sound south space speak special speech speed spell spend spoke spot spread
spring square stand star start state station stay steam steel step stick still stone stood stop store
story straight strange stream street stretch string strong student study subject substance success sudden
suffix sugar suggest suit summer sun supply support sure surface surprise swim syllable symbol system
table tail take talk tall teach team teeth tell temperature ten term test thank thick thin thing think
third those though thought thousand three through throw tie time tiny tire together told tone tool top
total touch toward town track trade train travel tree triangle trip trouble truck true try tube turn
twenty two type under unit until use usual valley value vary verb very view village visit voice vowel wait
walk wall want war warm wash watch water wave way wear weather week weight well went west wheel where
which while white whole why wide wife wild will win wind window wing winter wire wish woman wonder wood
word work world write wrong yard year yellow yes young
"""

WORDS = tuple(_TEXT.split())

FILLERS = (" a", " I", " the", " of", " to", " in", " is", " and", " it", " on")
