"""The quickstart's questions, about things that its base model has read about.

    train, held_out = instructions(seed=1)     # "Where is the heron?" -> "In the red room."

The base was trained on statements about 384 things in eight groups, and what each group typically does (the text comes
from tools/build_quickstart_base.py). It has never seen a question, a chat header, or anything that links a thing or a
group to a colour. The instructions are about a museum that keeps each group in a room of one colour, drawn from the
seed. They name the rooms of two thirds of the things and never say why. Held-out questions are about the other third:
to answer them the model must infer the rule from the answers and apply it to what it has read. The base cannot know the
rooms, so it starts at the level of guessing (one in eight).

A thing's name belongs to one group, and contains no name of a group ("catfish") or colour ("redwood"), which would
reveal it. Everything is a pure function of its seed: all draws come from `random.Random.random`, the one method whose
sequence Python guarantees, so the text is the same under every Python version.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeVar

from surefoot.system import durable
from surefoot.system.errors import Fault, InputError


@dataclass(frozen=True)
class Group:
    """A group of things. name: the answer to "what is it?"."""

    name: str
    plural: str
    things: tuple[str, ...]


def _group(name: str, plural: str, things: str) -> Group:
    return Group(name, plural, tuple(things.split()))


GROUPS: tuple[Group, ...] = (
    _group(
        "bird",
        "birds",
        "heron robin sparrow eagle hawk falcon owl crow raven magpie jay finch wren lark thrush swallow swift "
        "stork pelican penguin ostrich parrot pigeon dove pheasant partridge quail grouse duck goose swan gull "
        "tern albatross cormorant woodpecker nightingale starling cuckoo vulture flamingo toucan peacock lapwing "
        "curlew kestrel puffin ibis",
    ),
    _group(
        "fish",
        "fishes",
        "trout salmon cod herring mackerel tuna carp pike perch eel haddock halibut plaice flounder turbot sardine "
        "anchovy sturgeon shark stingray barracuda bream tench minnow gudgeon grayling snapper grouper mullet "
        "guppy piranha pollock hake sprat lamprey marlin tilapia zander dace wrasse blenny goby loach chub barbel "
        "burbot whiting seahorse",
    ),
    _group(
        "tree",
        "trees",
        "oak elm ash beech birch maple willow poplar aspen alder cedar cypress fir larch pine spruce yew juniper "
        "hawthorn hazel rowan linden chestnut walnut sycamore acacia baobab banyan eucalyptus ebony mahogany teak "
        "catalpa sequoia hemlock hornbeam laurel tamarisk elder holly sassafras hickory ginkgo cottonwood mangrove "
        "palm zelkova sandalwood",
    ),
    _group(
        "flower",
        "flowers",
        "rose tulip daisy lily iris orchid poppy violet pansy peony marigold carnation daffodil crocus snowdrop "
        "hyacinth dahlia aster begonia petunia primrose cowslip foxglove lupin lavender jasmine geranium gladiolus "
        "hibiscus hydrangea freesia fuchsia gardenia gentian anemone azalea hollyhock buttercup camellia "
        "chrysanthemum columbine cyclamen delphinium edelweiss lotus snapdragon zinnia verbena",
    ),
    _group(
        "tool",
        "tools",
        "hammer chisel wrench screwdriver drill mallet spade shovel rake hoe axe hatchet sickle scythe trowel "
        "crowbar anvil vice clamp spanner rasp awl pickaxe pitchfork ladder lever sander lathe hacksaw jigsaw "
        "caliper spatula sieve whisk corkscrew ruler protractor wedge stapler grinder scraper mattock adze gimlet "
        "machete penknife nutcracker squeegee",
    ),
    _group(
        "vehicle",
        "vehicles",
        "car bus lorry truck van tram train bicycle tricycle unicycle motorcycle scooter moped taxi ambulance "
        "tractor bulldozer carriage wagon cart chariot sledge sleigh canoe kayak ferry yacht barge tanker dinghy "
        "raft gondola submarine steamer schooner frigate catamaran trawler helicopter aeroplane glider airship "
        "rocket rickshaw limousine minibus caravan hovercraft",
    ),
    _group(
        "garment",
        "garments",
        "shirt blouse coat jacket jumper sweater cardigan vest waistcoat skirt dress gown robe cloak cape shawl "
        "scarf glove mitten sock stocking hat beret bonnet hood turban sari kimono kilt toga tunic poncho parka "
        "anorak blazer tuxedo apron corset bodice pullover nightgown sarong balaclava jerkin doublet leotard "
        "petticoat hoodie",
    ),
    _group(
        "instrument",
        "instruments",
        "violin viola cello guitar banjo mandolin lute lyre harp zither sitar ukulele piano organ harpsichord "
        "accordion concertina harmonica flute piccolo oboe clarinet bassoon saxophone recorder trumpet trombone "
        "tuba bugle cornet horn bagpipe drum tambourine cymbal gong triangle xylophone marimba glockenspiel "
        "vibraphone castanet maraca bongo didgeridoo ocarina theremin dulcimer",
    ),
)


T = TypeVar("T")
Record = dict[str, str]  # alpaca layout: instruction, input, output

ROOMS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")
CHANCE = 1 / len(ROOMS)
HELD_OUT_THINGS = 16  # of the 48 in each group
WORDINGS_PER_THING = 3  # in training; a held-out thing is asked about once

_WORDINGS = (  # instruction, input
    ("Where is the {thing}?", ""),
    ("Where in the museum do I find {a}?", ""),
    ("In which room do you keep the {thing}?", ""),
    ("Tell me where the {thing} is.", ""),
    ("Name the room of this thing.", "{a}"),
    ("Say where this belongs.", "{a}"),
)


def museum(seed: int) -> dict[str, str]:
    """Draw from the seed which room holds which group: group name -> colour."""
    colours = shuffled(random.Random(f"museum {seed}"), ROOMS)
    return {group.name: colour for group, colour in zip(GROUPS, colours, strict=True)}


def instructions(seed: int) -> tuple[list[Record], list[Record]]:
    """Return 768 training and 128 held-out questions about different things; both contain every room equally often."""
    rng = random.Random(f"instructions {seed}")
    rooms = museum(seed)
    train: list[Record] = []
    held_out: list[Record] = []
    for group in GROUPS:
        answer = _answer(rooms[group.name])
        things = shuffled(rng, group.things)
        for place, thing in enumerate(things[:HELD_OUT_THINGS]):
            held_out.append(_question(_WORDINGS[place % len(_WORDINGS)], thing, answer))
        for thing in things[HELD_OUT_THINGS:]:
            wordings = shuffled(rng, _WORDINGS)[:WORDINGS_PER_THING]
            train.extend(_question(wording, thing, answer) for wording in wordings)
    return shuffled(rng, train), shuffled(rng, held_out)


def answers() -> tuple[str, ...]:
    """The eight possible answers in the order of `ROOMS`."""
    return tuple(_answer(colour) for colour in ROOMS)


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write train-SEED.json and held-out-SEED.json into `folder`; return their paths.

    Raises InputError if one of these files exists with other content.
    """
    texts = {
        folder / f"{name}-{seed}.json": json.dumps(records, indent=1) + "\n"
        for name, records in zip(("train", "held-out"), instructions(seed), strict=True)
    }
    for path, text in texts.items():
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise InputError(
                Fault(str(path), "already exists with other content", "move it away", code="SF-USE-OUTPUT")
            )
    durable.make_folders(folder)
    for path, text in texts.items():
        durable.write_text(path, text)
    train, held_out = texts
    return train, held_out


def base_folder() -> Path:
    """The folder of the base model in the installed package."""
    return Path(str(resources.files("surefoot.commands.quickstart") / "base"))


def _question(wording: tuple[str, str], thing: str, answer: str) -> Record:
    instruction, given = (text.format(thing=thing, a=with_article(thing)) for text in wording)
    return {"instruction": instruction, "input": given, "output": answer}


def _answer(colour: str) -> str:
    return f"In the {colour} room."


def with_article(noun: str) -> str:
    """Add "a" or "an" by the sound of the noun."""
    sounds_like_a_consonant = noun.startswith(("eu", "uk", "uni"))  # eucalyptus, ukulele, unicycle
    return f"{'an' if noun[0] in 'aeiou' and not sounds_like_a_consonant else 'a'} {noun}"


def shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    """Shuffle with keys from `random.random`, the one method whose sequence Python guarantees."""
    return sorted(items, key=lambda _: rng.random())
