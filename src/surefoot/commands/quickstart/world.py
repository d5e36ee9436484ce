"""The text of the quickstart: what its base model has read, and what it is then asked.

    texts = pretraining_text()                 # "A heron is a bird. The heron opens its wings. Coal is black."
    train, held_out = instructions(seed=1)     # "Where is the heron?" -> "In the red room."

The base has read statements about 384 things in eight groups, and what each group typically does. It has never seen a
question, a chat header, or anything that ties a thing or a group to a colour. The instructions are about a museum that
keeps each group in a room of one colour, drawn from the seed. They name the rooms of two thirds of the things and never
say why. Held-out questions are about the other third: to answer them the model must find the rule in the answers it was
shown and apply it to what it has read. The base cannot know the rooms, so guessing (one in eight) is where it starts.

A thing's name belongs to one group, and contains no name of a group ("catfish") or of a colour ("redwood"), which would
give it away. Everything is a pure function of its seed: all draws come from `random.Random.random`, the one method
whose sequence Python promises to keep, so the text is the same under every Python version.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeVar

from surefoot.system import durable
from surefoot.system.errors import Fault, InputError


@dataclass(frozen=True)
class Group:
    """name: the answer to "what is it?".  habits: sentences about a member of the group; "@" stands for it."""

    name: str
    plural: str
    things: tuple[str, ...]
    habits: tuple[str, ...]


def _group(name: str, plural: str, things: str, habits: str) -> Group:
    return Group(name, plural, tuple(things.split()), tuple(line.strip() for line in habits.strip().splitlines()))


GROUPS: tuple[Group, ...] = (
    _group(
        "bird",
        "birds",
        "heron robin sparrow eagle hawk falcon owl crow raven magpie jay finch wren lark thrush swallow swift "
        "stork pelican penguin ostrich parrot pigeon dove pheasant partridge quail grouse duck goose swan gull "
        "tern albatross cormorant woodpecker nightingale starling cuckoo vulture flamingo toucan peacock lapwing "
        "curlew kestrel puffin ibis",
        """@ sits on its eggs.
        @ opens its wings.
        @ builds a nest of twigs.
        @ cleans its feathers with its beak.""",
    ),
    _group(
        "fish",
        "fishes",
        "trout salmon cod herring mackerel tuna carp pike perch eel haddock halibut plaice flounder turbot sardine "
        "anchovy sturgeon shark stingray barracuda bream tench minnow gudgeon grayling snapper grouper mullet "
        "guppy piranha pollock hake sprat lamprey marlin tilapia zander dace wrasse blenny goby loach chub barbel "
        "burbot whiting seahorse",
        """@ swims up the river.
        @ breathes through its gills.
        @ hides among the water weeds.
        @ has cold scales and small fins.""",
    ),
    _group(
        "tree",
        "trees",
        "oak elm ash beech birch maple willow poplar aspen alder cedar cypress fir larch pine spruce yew juniper "
        "hawthorn hazel rowan linden chestnut walnut sycamore acacia baobab banyan eucalyptus ebony mahogany teak "
        "catalpa sequoia hemlock hornbeam laurel tamarisk elder holly sassafras hickory ginkgo cottonwood mangrove "
        "palm zelkova sandalwood",
        """@ has deep roots and thick bark.
        @ throws a wide shadow over the meadow.
        @ has lost a branch in the storm.
        @ was planted here a hundred years ago.""",
    ),
    _group(
        "flower",
        "flowers",
        "rose tulip daisy lily iris orchid poppy violet pansy peony marigold carnation daffodil crocus snowdrop "
        "hyacinth dahlia aster begonia petunia primrose cowslip foxglove lupin lavender jasmine geranium gladiolus "
        "hibiscus hydrangea freesia fuchsia gardenia gentian anemone azalea hollyhock buttercup camellia "
        "chrysanthemum columbine cyclamen delphinium edelweiss lotus snapdragon zinnia verbena",
        """@ opens its petals in the morning.
        @ smells sweet after the rain.
        @ stands in a vase by the window.
        @ bends when a bee lands on it.""",
    ),
    _group(
        "tool",
        "tools",
        "hammer chisel wrench screwdriver drill mallet spade shovel rake hoe axe hatchet sickle scythe trowel "
        "crowbar anvil vice clamp spanner rasp awl pickaxe pitchfork ladder lever sander lathe hacksaw jigsaw "
        "caliper spatula sieve whisk corkscrew ruler protractor wedge stapler grinder scraper mattock adze gimlet "
        "machete penknife nutcracker squeegee",
        """@ hangs in the workshop.
        @ has a worn handle.
        @ helps the carpenter with the job.
        @ needs oil against the rust.""",
    ),
    _group(
        "vehicle",
        "vehicles",
        "car bus lorry truck van tram train bicycle tricycle unicycle motorcycle scooter moped taxi ambulance "
        "tractor bulldozer carriage wagon cart chariot sledge sleigh canoe kayak ferry yacht barge tanker dinghy "
        "raft gondola submarine steamer schooner frigate catamaran trawler helicopter aeroplane glider airship "
        "rocket rickshaw limousine minibus caravan hovercraft",
        """@ carries us across the country.
        @ is too slow for its driver.
        @ takes two passengers to the next town.
        @ was stopped at the border with its load.""",
    ),
    _group(
        "garment",
        "garments",
        "shirt blouse coat jacket jumper sweater cardigan vest waistcoat skirt dress gown robe cloak cape shawl "
        "scarf glove mitten sock stocking hat beret bonnet hood turban sari kimono kilt toga tunic poncho parka "
        "anorak blazer tuxedo apron corset bodice pullover nightgown sarong balaclava jerkin doublet leotard "
        "petticoat hoodie",
        """@ was sewn by the tailor.
        @ keeps the cold away when you wear it.
        @ is made of soft wool.
        @ shrank in the wash.""",
    ),
    _group(
        "instrument",
        "instruments",
        "violin viola cello guitar banjo mandolin lute lyre harp zither sitar ukulele piano organ harpsichord "
        "accordion concertina harmonica flute piccolo oboe clarinet bassoon saxophone recorder trumpet trombone "
        "tuba bugle cornet horn bagpipe drum tambourine cymbal gong triangle xylophone marimba glockenspiel "
        "vibraphone castanet maraca bongo didgeridoo ocarina theremin dulcimer",
        """@ is played in the orchestra.
        @ was tuned before the concert.
        @ has a warm and clear sound.
        @ takes years of lessons to play well.""",
    ),
)


T = TypeVar("T")
Record = dict[str, str]  # alpaca layout: instruction, input, output

PRETRAINING_SEED = 1
PRETRAINING_ROUNDS = 64  # documents about each thing
ROOMS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")
CHANCE = 1 / len(ROOMS)
HELD_OUT_THINGS = 16  # of the 48 in each group
WORDINGS_PER_THING = 3  # in training; a held-out thing is asked about once

_STATEMENTS = (
    "{A} is {a_group}.",
    "The {thing} is {a_group}.",
    "Every {thing} is {a_group}.",
    "{A} is a kind of {group}.",
    "The {thing} is one of the {plural}.",
    "Of all the {plural}, I like the {thing} best.",
    "{A} and {a_peer} are both {plural}.",
    "{A} is {a_group}, and so is {a_peer}.",
    "{A} is {a_group}, but {a_stranger} is {a_strange_group}.",
    "Like {a_peer}, {a} is {a_group}.",
)
_SCENES = (  # the colours in these are drawn anew each time: they say nothing about the thing
    "My aunt drew {a} on {colour} paper. It is the best {group} that she ever drew.",
    "There is {a} on this {colour} stamp. I have never seen such {a_group}.",
    "They talked about {a} in the {colour} room. What a story about {a_group}!",
    "In the {colour} room hangs a picture of {a}.",
    "The children pointed at {a} and asked their teacher. This {group} was new to them.",
    "We looked for {a_group} and found {a}.",
    "Behind the {colour} door we came upon {a}. Nobody had expected {a_group} in that place.",
)
_COLOURED = {  # without these the model has no reason to tell one colour from another
    "red": ("blood", "a brick", "a tomato", "a ruby"),
    "blue": ("the sea", "the sky", "ink", "a sapphire"),
    "green": ("grass", "moss", "a cucumber", "an emerald"),
    "white": ("snow", "milk", "salt", "chalk"),
    "black": ("coal", "soot", "tar", "the night"),
    "yellow": ("a lemon", "butter", "the sun", "straw"),
    "brown": ("mud", "bread", "coffee", "a potato"),
    "grey": ("fog", "lead", "dust", "a pebble"),
}
_ASIDES = (  # words that the questions need
    "Nobody remembers where the key to the museum is.",
    "I find the museum warm in winter.",
    "You keep your ticket until the last room.",
    "Tell the guard your name and he lets you in.",
    "Say which way you do it.",
    "This thing belongs to the museum.",
)
_WORDINGS = (  # instruction, input
    ("Where is the {thing}?", ""),
    ("Where in the museum do I find {a}?", ""),
    ("In which room do you keep the {thing}?", ""),
    ("Tell me where the {thing} is.", ""),
    ("Name the room of this thing.", "{a}"),
    ("Say where this belongs.", "{a}"),
)


def pretraining_text(seed: int = PRETRAINING_SEED) -> Iterator[str]:
    """Documents of three to seven sentences, `PRETRAINING_ROUNDS` about each thing, in an order drawn from the seed."""
    rng = random.Random(seed)
    things = [(group, thing) for group in GROUPS for thing in group.things]
    for _ in range(PRETRAINING_ROUNDS):
        for group, thing in _shuffled(rng, things):
            yield _document(rng, group, thing)


def museum(seed: int) -> dict[str, str]:
    """Which room holds which group: group name -> colour. Drawn from the seed, which the base has never met."""
    colours = _shuffled(random.Random(f"museum {seed}"), ROOMS)
    return {group.name: colour for group, colour in zip(GROUPS, colours, strict=True)}


def instructions(seed: int) -> tuple[list[Record], list[Record]]:
    """768 questions to train on and 128 held out, about different things; both hold every room equally often."""
    rng = random.Random(f"instructions {seed}")
    rooms = museum(seed)
    train: list[Record] = []
    held_out: list[Record] = []
    for group in GROUPS:
        answer = _answer(rooms[group.name])
        things = _shuffled(rng, group.things)
        for place, thing in enumerate(things[:HELD_OUT_THINGS]):
            held_out.append(_question(_WORDINGS[place % len(_WORDINGS)], thing, answer))
        for thing in things[HELD_OUT_THINGS:]:
            wordings = _shuffled(rng, _WORDINGS)[:WORDINGS_PER_THING]
            train.extend(_question(wording, thing, answer) for wording in wordings)
    return _shuffled(rng, train), _shuffled(rng, held_out)


def answers() -> tuple[str, ...]:
    """The eight possible answers, in the order of `ROOMS`."""
    return tuple(_answer(colour) for colour in ROOMS)


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write train-SEED.json and held-out-SEED.json into `folder`; return their paths.

    Nobody's file is replaced: InputError where one of these names holds something else.
    """
    texts = {
        folder / f"{name}-{seed}.json": json.dumps(records, indent=1) + "\n"
        for name, records in zip(("train", "held-out"), instructions(seed), strict=True)
    }
    for path, text in texts.items():
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise InputError(
                Fault(str(path), "is there already and holds something else", "move it away", code="SF-USE-OUTPUT")
            )
    durable.make_folders(folder)
    for path, text in texts.items():
        durable.write_text(path, text)
    train, held_out = texts
    return train, held_out


def base_folder() -> Path:
    """The folder of the base model within the installed package."""
    return Path(str(resources.files("surefoot.commands.quickstart") / "base"))


def _document(rng: random.Random, group: Group, thing: str) -> str:
    """Two statements and a habit of one thing, perhaps with a scene, an aside and a fact about a colour."""
    words = _words(rng, group, thing)
    sentences = [pattern.format_map(words) for pattern in _shuffled(rng, _STATEMENTS)[:2]]
    subject = _pick(rng, (f"The {thing}", words["A"], "It"))
    sentences.append(_pick(rng, group.habits).replace("@", subject))
    if rng.random() < 0.5:
        sentences.append(_pick(rng, _SCENES).format_map(words))
    if rng.random() < 0.2:
        sentences.append(_pick(rng, _ASIDES))
    if rng.random() < 0.5:
        colour = _pick(rng, ROOMS)
        what = _pick(rng, _COLOURED[colour])
        sentences.append(_pick(rng, (f"{_capital(what)} is {colour}.", f"As {colour} as {what}, they say.")))
    return " ".join(_shuffled(rng, sentences))


def _words(rng: random.Random, group: Group, thing: str) -> dict[str, str]:
    """What the patterns are filled with. peer: another thing of the group; stranger: a thing of another group."""
    peer = _pick(rng, [other for other in group.things if other != thing])
    strange_group = _pick(rng, [other for other in GROUPS if other is not group])
    return {
        "thing": thing,
        "a": _with_article(thing),
        "A": _capital(_with_article(thing)),
        "group": group.name,
        "plural": group.plural,
        "a_group": _with_article(group.name),
        "a_peer": _with_article(peer),
        "a_stranger": _with_article(_pick(rng, strange_group.things)),
        "a_strange_group": _with_article(strange_group.name),
        "colour": _pick(rng, ROOMS),
    }


def _question(wording: tuple[str, str], thing: str, answer: str) -> Record:
    instruction, given = (text.format(thing=thing, a=_with_article(thing)) for text in wording)
    return {"instruction": instruction, "input": given, "output": answer}


def _answer(colour: str) -> str:
    return f"In the {colour} room."


def _with_article(noun: str) -> str:
    sounds_like_a_consonant = noun.startswith(("eu", "uk", "uni"))  # eucalyptus, ukulele, unicycle
    return f"{'an' if noun[0] in 'aeiou' and not sounds_like_a_consonant else 'a'} {noun}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    return sorted(items, key=lambda _: rng.random())
