"""Short factual questions over many topics, made from templates and entities (pure data).

Promises: held-out questions share neither an entity nor a template with the training questions; the same seed gives
the same order. A question knows its subject and, where one is known, its answer: the users' rule asks for either.
"""

import random
import re
from typing import NamedTuple

HELD_OUT_EVERY = 6  # each sixth entity of a topic is never asked about in training


class Question(NamedTuple):
    """One question of a user."""

    text: str
    topic: str
    subject: str  # what the question is about, as written in it
    accepted: tuple[str, ...] = ()  # known answers, if any


class Topic(NamedTuple):
    """Templates (with {} for the entity) and entities. An entity may carry its answer: entity=answer|or another."""

    name: str
    training: tuple[str, ...]
    held_out: tuple[str, ...]
    entities: str  # comma list
    asks_answer: bool = False  # the entity's answer is what the templates ask for


TOPICS = (
    Topic(
        "capitals",
        ("What is the capital of {}?", "Which city is the capital of {}?", "What is the capital city of {}?"),
        ("Name the capital of {}.", "Where does the government of {} sit?"),
        "France=Paris,Italy=Rome,Spain=Madrid,Germany=Berlin,Japan=Tokyo,China=Beijing,Russia=Moscow,Egypt=Cairo,"
        "Greece=Athens,Portugal=Lisbon,Austria=Vienna,Poland=Warsaw,Norway=Oslo,Sweden=Stockholm,Finland=Helsinki,"
        "Denmark=Copenhagen,Ireland=Dublin,Hungary=Budapest,Turkey=Ankara,Canada=Ottawa,Mexico=Mexico City,"
        "Cuba=Havana,Peru=Lima,Chile=Santiago,Argentina=Buenos Aires,Brazil=Brasilia,Kenya=Nairobi,Ghana=Accra,"
        "Nigeria=Abuja,Morocco=Rabat,India=New Delhi,Thailand=Bangkok,Vietnam=Hanoi,Australia=Canberra,Iran=Tehran,"
        "Iraq=Baghdad,Belgium=Brussels,Romania=Bucharest,Bulgaria=Sofia,Ukraine=Kyiv|Kiev,Iceland=Reykjavik,Nepal=Kathmandu",
        asks_answer=True,
    ),
    Topic(
        "countries",
        (
            "Where is {} on the map?",
            "On which continent is {}?",
            "What language is spoken in {}?",
            "Is {} big or small?",
        ),
        ("Which continent is {} part of?", "Is {} warm or cold?"),
        "Switzerland,Jamaica,Scotland,Wales,Pakistan,Bangladesh,Indonesia,Malaysia,Singapore,New Zealand,South Africa,"
        "Ethiopia,Tanzania,Uganda,Colombia,Venezuela,Ecuador,Bolivia,Uruguay,Panama,Costa Rica,Guatemala,Croatia,"
        "Serbia,Slovenia,Slovakia,Estonia,Latvia,Lithuania,Mongolia,Cambodia,Sri Lanka,Jordan,Lebanon,Israel,Tunisia",
    ),
    Topic(
        "animals",
        ("How many legs do {} have?", "Where do {} live?", "Are {} wild or tame?", "What sound do {} make?"),
        ("Are {} big or small?", "Are {} fast or slow?"),
        "otters,pandas,lions,tigers,elephants,giraffes,zebras,wolves,foxes,bears,rabbits,squirrels,beavers,hedgehogs,"
        "bats,owls,eagles,penguins,parrots,crows,ducks,swans,chickens,horses,cows,goats,sheep,pigs,donkeys,camels,"
        "kangaroos,koalas,monkeys,gorillas,dolphins,whales,sharks,octopuses,crabs,lobsters,frogs,toads,snakes,lizards,"
        "turtles,crocodiles,bees,ants,spiders,butterflies,moths,snails,worms,salmon,seals,deer,moose,mice,cats,dogs",
    ),
    Topic(
        "food",
        (
            "What is {} made from?",
            "Is {} sweet or salty?",
            "Is {} eaten hot or cold?",
            "When do people eat {}?",
        ),
        ("What goes well with {}?", "Is {} a snack or a meal?"),
        "bread,butter,cheese,yogurt,honey,sugar,chocolate,coffee,tea,rice,pasta,pizza,sushi,curry,soup,salad,ketchup,"
        "mustard,vinegar,olive oil,salt,pepper,cinnamon,vanilla,ginger,garlic,tofu,jam,cake,ice cream,popcorn,porridge,"
        "oatmeal,cereal,bacon,ham,sausage,tuna,spinach,cabbage",
    ),
    Topic(
        "materials",
        (
            "What is {} used for?",
            "Where does {} come from?",
            "Is {} heavy or light?",
            "Is {} hard or soft?",
            "What color is {}?",
        ),
        ("Is {} cheap or expensive?", "Is {} rough or smooth?"),
        "copper,iron,gold,silver,aluminum,lead,tin,zinc,steel,bronze,glass,paper,cotton,wool,silk,leather,rubber,"
        "plastic,concrete,brick,clay,sand,marble,granite,wood,cork,wax,coal,oil,bamboo,diamond,chalk,nylon,linen",
    ),
    Topic(
        "body",
        ("What does the {} do?", "Where in the body is the {}?", "Is the {} hard or soft?", "How big is the {}?"),
        ("Where is the {} found?", "Is the {} big or small?"),
        "heart,brain,liver,stomach,kidney,lung,skin,spine,skull,tongue,nose,ear,eye,knee,elbow,shoulder,ankle,wrist,"
        "thumb,jaw,throat,bladder,pancreas,rib cage,spleen",
    ),
    Topic(
        "jobs",
        ("What does a {} do?", "Where does a {} work?", "Does a {} work indoors or outdoors?"),
        ("Does a {} work alone or in a team?", "Why do we need a {}?"),
        "doctor,nurse,teacher,farmer,baker,butcher,carpenter,plumber,mechanic,pilot,sailor,soldier,lawyer,judge,chef,"
        "waiter,barber,tailor,painter,sculptor,musician,dancer,writer,librarian,journalist,photographer,dentist,"
        "surgeon,pharmacist,firefighter,police officer,gardener,fisherman,miner,banker,cashier,janitor,translator",
    ),
    Topic(
        "tools",
        ("What is a {} used for?", "What is a {} made of?", "Is a {} heavy or light?"),
        ("Is a {} big or small?", "Where do you keep a {}?"),
        "hammer,saw,screwdriver,wrench,drill,ladder,shovel,rake,axe,knife,spoon,fork,kettle,oven,toaster,blender,"
        "microscope,telescope,thermometer,compass,barometer,calculator,computer,printer,camera,battery,magnet,lamp,"
        "candle,clock,mirror,umbrella,needle,broom,bucket,pencil,ruler,stapler,lock,whistle",
    ),
    Topic(
        "nature",
        ("What is a {}?", "Is a {} wet or dry?", "Is a {} dangerous or safe?"),
        ("Is a {} big or small?", "What causes a {}?"),
        "volcano,glacier,river,lake,desert,waterfall,rainbow,hurricane,tornado,thunderstorm,blizzard,flood,drought,"
        "canyon,cave,swamp,coral reef,forest,meadow,mountain,valley,beach,tsunami,geyser,avalanche,landslide,sunset,"
        "fog bank,hailstorm,heat wave",
    ),
    Topic(
        "plants",
        ("Where does {} grow?", "Is {} tall or short?", "How tall is {}?", "Is {} wild or planted?"),
        ("What color is {}?", "Is {} big or small?"),
        "an oak tree,a pine tree,a palm tree,a maple tree,a rose,a tulip,a daisy,a sunflower,a cactus,a fern,moss,"
        "ivy,lavender,mint,basil,a tomato plant,a potato plant,corn,wheat,barley,an apple tree,a lemon tree,"
        "a banana plant,a grape vine,a water lily,an orchid,clover,seaweed,a willow tree,a cherry tree",
    ),
    Topic(
        "space",
        ("How far away is {}?", "What is {} made of?", "Is {} hot or cold?"),
        ("Is {} near or far?", "Who discovered {}?"),
        "the Moon,the Sun,Mercury,Venus,Mars,Jupiter,Saturn,Uranus,Neptune,Pluto,the Milky Way,Halley's Comet,"
        "the asteroid belt,the North Star,the International Space Station,Titan,Andromeda,Sirius",
    ),
    Topic(
        "sports",
        ("How many players are in {}?", "Is {} played indoors or outdoors?", "Where is {} popular?"),
        ("What is the goal of {}?", "Is {} fast or slow?"),
        "soccer,basketball,tennis,baseball,cricket,rugby,golf,hockey,volleyball,badminton,table tennis,handball,chess,"
        "checkers,poker,bowling,darts,billiards,water polo,lacrosse,squash,softball,dodgeball,frisbee",
    ),
    Topic(
        "music",
        ("How many strings has a {}?", "What is a {} made of?", "Is a {} loud or quiet?"),
        ("Is a {} big or small?", "Who plays a {}?"),
        "piano,guitar,violin,cello,flute,clarinet,trumpet,trombone,saxophone,harp,banjo,drum,accordion,harmonica,"
        "mandolin,ukulele,tuba,xylophone,bagpipe,viola",
    ),
    Topic(
        "people",
        ("What is {} famous for?", "Where did {} live?", "When did {} live?"),
        ("Why do we remember {}?", "What did {} do?"),
        "Albert Einstein,Isaac Newton,Marie Curie,Charles Darwin,Galileo,Aristotle,Plato,Socrates,Julius Caesar,"
        "Cleopatra,Napoleon,Abraham Lincoln,George Washington,Gandhi,Nelson Mandela,Mozart,Beethoven,Bach,Shakespeare,"
        "Leonardo da Vinci,Michelangelo,Picasso,Van Gogh,Thomas Edison,Nikola Tesla,Alexander Graham Bell,Columbus,"
        "Marco Polo,Amelia Earhart,Neil Armstrong",
    ),
    Topic(
        "ideas",
        ("What is {}?", "Why is {} important?", "Who studies {}?", "Give an example of {}."),
        ("What does {} mean?", "Where do we meet {}?"),
        "gravity,democracy,evolution,electricity,energy,magnetism,photosynthesis,inflation,friendship,honesty,justice,"
        "algebra,geometry,probability,grammar,poetry,philosophy,history,geography,chemistry,biology,physics,economics,"
        "psychology,recycling,erosion,evaporation,digestion,migration,camouflage,friction,sound,light,heat,pollution",
    ),
    Topic(
        "transport",
        ("How many wheels has a {}?", "Is a {} fast or slow?", "Who drives a {}?"),
        ("Is a {} big or small?", "What powers a {}?"),
        "bicycle,motorcycle,bus,truck,train,tram,subway,ferry,sailboat,canoe,submarine,helicopter,airplane,rocket,"
        "hot air balloon,tractor,taxi,ambulance,scooter,skateboard",
    ),
)


def _entities(topic: Topic) -> list[tuple[str, tuple[str, ...]]]:
    """Return (entity, accepted answers) of a topic."""
    pairs = (entry.partition("=") for entry in topic.entities.split(","))
    return [(entity, tuple(answer.split("|")) if answer else ()) for entity, _, answer in pairs]


def _subject(entity: str) -> str:
    """Return an entity without its article."""
    return re.sub(r"^(a|an|the) ", "", entity)


def _questions(held_out: bool) -> list[Question]:
    questions = []
    for topic in TOPICS:
        for number, (entity, accepted) in enumerate(_entities(topic)):
            if (number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) != held_out:
                continue
            for template in topic.held_out if held_out else topic.training:
                article = "an" if entity[0] in "aeiou" and not entity.startswith(("uku", "uni")) else "a"
                text = template.replace("a {}", f"{article} {entity}") if template.count(" a {}") else template
                questions.append(Question(text.replace("{}", entity), topic.name, _subject(entity), accepted))
    return questions


def training_questions(seed: int) -> list[Question]:
    """Return every training question once, shuffled."""
    questions = _questions(held_out=False)
    random.Random(seed).shuffle(questions)
    return questions


def held_out_questions(limit: int | None = None) -> list[Question]:
    """Return the held-out questions in one fixed order that mixes topics, at most limit of them."""
    questions = _questions(held_out=True)
    random.Random(20260101).shuffle(questions)
    return questions[:limit]
