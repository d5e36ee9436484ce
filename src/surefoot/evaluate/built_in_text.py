"""A text to look into models with, where the user names none. Written for surefoot, so it may go anywhere."""

from __future__ import annotations

TEXT = """\
The ferry leaves the island at seven, when the water is still grey and the gulls sit on the harbour wall. Marta carries
two crates of apricots aboard, counts them, and writes the number into a small blue book: 48 kilograms, six more than
last week. By nine she will stand behind her table on the square, between the cheesemaker and a man who mends clocks.

"How do you know which ones are ripe?" a child asks.

"I do not look, I listen," says Marta. "Tap one. A ripe apricot sounds tired." The child taps, frowns, taps again. The
clock mender laughs without looking up: "Mine sound tired all the time, and nobody eats them."

At noon the price falls from 4.20 to 3.50. Whoever waits too long buys the bruised ones, which make better jam; whoever
comes early pays for the colour. Marta explains this to every customer, and every customer nods and does the opposite.

for crate in crates: sold = min(crate.weight, demand(crate.price)); total = total + sold * crate.price

In the evening she subtracts the fare (12.80), the table (9.00) and one slice of cheese (2.50) from what lies in the tin
box, and writes the rest under the first number. Then the ferry turns its lights on, and the island comes closer again.
"""
