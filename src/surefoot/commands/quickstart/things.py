"""The inhabitants of the quickstart world: eight groups of 48 things each, and what each group typically does.

Only names that belong to one group and contain no name of a group ("catfish") or of a colour ("redwood"), which would
give themselves away.
"""

from __future__ import annotations

from dataclasses import dataclass


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
