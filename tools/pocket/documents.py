"""Small printed documents (receipts, forms, labels): their lines of text, and questions answered by reading them.

A document is a list of text lines with a place, a font and a size each; draw.py prints them on a page of 336 x 336
pixels. Every answer stands on the page character for character. Names and words come from the lists below, numbers,
dates and codes are drawn digit by digit, so a page is practically never seen twice.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

FIRST_NAMES = (
    "Alice Adam Anna Ben Clara Daniel Diana Emma Eric Fiona Frank Grace Henry Hugo Irene Jack Julia Karl Laura Leo Maria "
    "Martin Nina Noah Olga Oscar Paula Peter Rosa Ruth Samuel Sofia Thomas Vera Victor Walter Yusuf Zoe"
).split()
LAST_NAMES = (
    "Abbott Baker Bennett Brown Carter Clark Cooper Dixon Evans Fischer Foster Garcia Graham Harris Hughes Jensen Keller "
    "Kumar Lewis Marsh Meyer Moore Novak Owens Parker Quinn Reed Rossi Schmidt Silva Stone Tanaka Turner Vogel Walker "
    "Webb Weber Young"
).split()
STORE_FIRST = (
    "Blue Bright Corner Crystal East Garden Golden Grand Green Happy Lucky Maple Metro Morning North Ocean Old Park Red "
    "River Royal Silver Sunny Union West"
).split()
STORE_LAST = "Bakery Bazaar Books Cafe Deli Diner Foods Grill Grocer Kitchen Market Pharmacy Shop Store Supply Tools".split()
ITEMS = (
    "Apples Bagels Bananas Batteries Beans Bread Butter Candles Carrots Cereal Cheese Coffee Cookies Cream Eggs Flour "
    "Grapes Honey Juice Lemons Milk Muffins Napkins Noodles Olives Onions Oranges Paper Pasta Pears Pencils Pepper "
    "Pizza Rice Salad Salt Sandwich Soap Soup Sugar Tea Tomatoes Water Yogurt"
).split()
STREETS = "Bridge Castle Cedar Church Elm Forest Hill King Lake Mill Oak Park Pine Queen River School Spring Station".split()
ROADS = "Street Road Lane Avenue".split()
CITIES = (
    "Aberdeen Amsterdam Berlin Boston Bristol Cairo Chicago Denver Dublin Geneva Hamburg Houston Leeds Lima Lisbon London "
    "Madrid Milan Munich Nairobi Oslo Oxford Paris Prague Rome Seattle Sydney Tokyo Turin Vienna York Zurich"
).split()
MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
FORM_TITLES = (
    "Membership Form",
    "Registration Form",
    "Library Card",
    "Visitor Pass",
    "Order Form",
    "Repair Request",
    "Travel Request",
    "Staff Record",
)
PLANS = "Basic Silver Gold Student Family Senior".split()
DEPARTMENTS = "Sales Support Finance Design Research Legal Transport Security".split()
CODE_LETTERS = "ABCDEFGHJKLMNPRSTUVXYZ"

PAGE = 336


@dataclass
class Line:
    """A run of text: x is its left edge (or right edge, or centre, by `align`), y its baseline, in pixels.

    A "|" in the text is not printed: it switches between the regular and the bold face of the font.
    """

    text: str
    x: int
    y: int
    font: int  # index into draw.FONTS
    size: int  # one of draw.FONT_SIZES
    align: str = "left"


@dataclass
class Document:
    kind: str
    lines: list[Line] = field(default_factory=list)
    rules: list[tuple[int, int, int]] = field(default_factory=list)  # horizontal strokes: x0, x1, y
    questions: list[tuple[str, list[str]]] = field(default_factory=list)
    description: str = ""


def make_document(rng: random.Random) -> Document:
    """Draws a receipt, a form or a label."""
    return rng.choice((_receipt, _receipt, _form, _form, _shipping_label, _product_label))(rng)


# Fonts as draw.FONTS orders them: (regular, bold) pairs of sans, serif and mono.
_FAMILIES = ((0, 1), (2, 3), (4, 5))


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choice(CODE_LETTERS) for _ in range(rng.randint(1, 2)))
    return f"{letters}{_digits(rng, rng.randint(3, 4))}" if rng.random() < 0.6 else f"{letters}-{_digits(rng, rng.randint(3, 4))}"


def _date(rng: random.Random) -> str:
    year, month, day = rng.randint(1990, 2029), rng.randint(1, 12), rng.randint(1, 28)
    style = rng.randrange(3)
    if style == 0:
        return f"{year}-{month:02d}-{day:02d}"
    if style == 1:
        return f"{day:02d}/{month:02d}/{year}"
    return f"{day} {MONTHS[month - 1]} {year}"


def _phone(rng: random.Random) -> str:
    return f"{_digits(rng, 3)}-{_digits(rng, 4)}" if rng.random() < 0.6 else f"{_digits(rng, 3)} {_digits(rng, 3)}"


def _person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def _street(rng: random.Random) -> str:
    return f"{rng.randint(1, 199)} {rng.choice(STREETS)} {rng.choice(ROADS)}"


def _money(cents: int) -> str:
    return f"${cents // 100}.{cents % 100:02d}"


def _ask(rng: random.Random, answer: str, *phrasings: str, also: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    return rng.choice(phrasings), [answer, *also]


def _receipt(rng: random.Random) -> Document:
    doc = Document("receipt")
    regular, bold = rng.choice(_FAMILIES)
    size = rng.choice((15, 16, 17))
    left, right = rng.randint(14, 34), PAGE - rng.randint(14, 34)
    middle = (left + right) // 2
    store = f"{rng.choice(STORE_FIRST)} {rng.choice(STORE_LAST)}"
    date = _date(rng)
    ask = doc.questions.append
    items = rng.sample(ITEMS, rng.randint(2, 5))
    prices = [rng.randint(45, 1999) for _ in items]
    extras = rng.sample(("street", "phone", "time", "cashier", "number"), rng.randint(1, 3))
    pitch = rng.randint(23, 25)
    rows = 1 + 1 + len(extras) + len(items) + 1
    y = rng.randint(26, max(27, 26 + PAGE - 48 - rows * pitch - 16))

    doc.lines.append(Line(store, middle, y, bold, rng.choice((18, 20)), "centre"))
    ask(_ask(rng, store, "What is the name of the store?", "Which store is this receipt from?"))
    y += pitch + 2
    order = ["date", *extras]
    rng.shuffle(order)
    for name in order:
        if name == "date":
            doc.lines.append(Line(date if rng.random() < 0.5 else f"Date: {date}", left, y, regular, size))
            ask(_ask(rng, date, "What is the date?", "What is the date on the receipt?"))
        elif name == "street":
            street = _street(rng)
            doc.lines.append(Line(street, left, y, regular, size))
            ask(_ask(rng, street, "What is the address of the store?", "What is the street address?"))
        elif name == "phone":
            phone = _phone(rng)
            doc.lines.append(Line(f"Tel {phone}" if rng.random() < 0.5 else f"Phone: {phone}", left, y, regular, size))
            ask(_ask(rng, phone, "What is the phone number?", "What is the phone number of the store?"))
        elif name == "time":
            time = f"{rng.randint(7, 21):02d}:{rng.randint(0, 59):02d}"
            doc.lines.append(Line(f"Time: {time}", left, y, regular, size))
            ask(_ask(rng, time, "What is the time?", "What is the time on the receipt?"))
        elif name == "cashier":
            cashier = rng.choice(FIRST_NAMES)
            doc.lines.append(Line(f"Cashier: {cashier}", left, y, regular, size))
            ask(_ask(rng, cashier, "Who is the cashier?", "What is the name of the cashier?"))
        else:
            number = _code(rng)
            doc.lines.append(Line(f"Receipt no: {number}", left, y, regular, size))
            ask(_ask(rng, number, "What is the receipt number?"))
        y += pitch
    doc.rules.append((left, right, y - pitch + 7))
    y += 3
    for item, cents in zip(items, prices):
        price = _money(cents)
        doc.lines.append(Line(item, left, y, regular, size))
        doc.lines.append(Line(price, right, y, regular, size, "right"))
        ask(_ask(rng, price, f"What is the price of {item}?", f"What does the receipt charge for {item}?", also=(price[1:],)))
        y += pitch
    doc.rules.append((left, right, y - pitch + 7))
    y += 3
    total = _money(sum(prices))
    doc.lines.append(Line("Total", left, y, bold, size))
    doc.lines.append(Line(total, right, y, bold, size, "right"))
    ask(_ask(rng, total, "What is the total?", "What is the total amount?", also=(total[1:],)))
    doc.description = f"A receipt from {store}, dated {date}, with a total of {total}."
    return doc


def _form(rng: random.Random) -> Document:
    doc = Document("form")
    regular, bold = rng.choice(_FAMILIES)
    size = rng.choice((15, 16, 17))
    left = rng.randint(14, 30)
    title = rng.choice(FORM_TITLES)
    person = _person(rng)
    on = "card" if "Card" in title else "pass" if "Pass" in title else "record" if "Record" in title else "form"
    ask = doc.questions.append
    fields = {
        "Date": (_date(rng), ("What is the date?", f"What is the date on the {on}?")),
        "Date of birth": (_date(rng), ("What is the date of birth?", "When was the person born?")),
        "City": (rng.choice(CITIES), ("What is the city?", "Which city is given?")),
        "Phone": (_phone(rng), ("What is the phone number?",)),
        "Address": (_street(rng), ("What is the address?", "What is the street address?")),
        "Number": (_code(rng), ("What is the number?", f"What is the number on the {on}?")),
        "Plan": (rng.choice(PLANS), ("What is the plan?", "Which plan is given?")),
        "Department": (rng.choice(DEPARTMENTS), ("What is the department?", "Which department is given?")),
        "Amount": (_money(rng.randint(100, 99999)), ("What is the amount?",)),
        "Contact": (_person(rng), ("Who is the contact?", "What is the name of the contact?")),
    }
    chosen = rng.sample(list(fields), rng.randint(3, 6))
    place = rng.randint(0, 1) if rng.random() < 0.3 else 0
    chosen.insert(place, "Name")
    fields["Name"] = (person, ("What is the name?", f"What is the name on the {on}?"))
    pitch = rng.randint(26, 34)
    y = rng.randint(30, max(31, 30 + PAGE - 60 - (len(chosen) + 1) * pitch))
    centred = rng.random() < 0.5
    doc.lines.append(Line(title, PAGE // 2 if centred else left, y, bold, rng.choice((18, 20)), "centre" if centred else "left"))
    ask(_ask(rng, title, "What is the title of the document?", "What is the title?"))
    doc.rules.append((left, PAGE - left, y + 9))
    y += pitch + 4
    bold_labels, bold_values = rng.choice(((True, False), (False, False), (False, True)))
    tab = left + {15: 132, 16: 140, 17: 148}[size] if rng.random() < 0.4 else 0
    for name in chosen:
        value, phrasings = fields[name]
        if tab and len(value) <= 13:
            doc.lines.append(Line(f"{name}:", left, y, bold if bold_labels else regular, 15))
            doc.lines.append(Line(value, tab, y, bold if bold_values else regular, size))
        elif not bold_labels and not bold_values:
            doc.lines.append(Line(f"{name}: {value}", left, y, regular, size))
        else:
            doc.lines.append(Line(f"{name}: |{value}", left, y, bold if bold_labels else regular, 15))
        ask(_ask(rng, value, *phrasings))
        y += pitch
    article = "An" if title[0] == "O" else "A"
    doc.description = f"{article} {title.lower()} of {person}."
    return doc


def _shipping_label(rng: random.Random) -> Document:
    doc = Document("label")
    regular, bold = rng.choice(_FAMILIES)
    size = rng.choice((16, 17, 18))
    left = rng.randint(16, 44)
    ask = doc.questions.append
    to, sender = _person(rng), f"{rng.choice(STORE_FIRST)} {rng.choice(STORE_LAST)}"
    street, city, postcode = _street(rng), rng.choice(CITIES), _digits(rng, 5)
    weight = f"{rng.randint(0, 29)}.{rng.randint(1, 9)} kg"
    tracking = _code(rng)
    pitch = rng.randint(25, 29)
    extras = rng.sample(("from", "weight", "tracking"), rng.randint(1, 3))
    y = rng.randint(30, max(31, 30 + PAGE - 70 - (4 + len(extras)) * pitch))
    doc.lines.append(Line("Ship to:", left, y, bold, size))
    y += pitch
    doc.lines.append(Line(to, left, y, regular, rng.choice((18, 20)) if size == 18 else size))
    ask(_ask(rng, to, "Who is the label addressed to?", "What is the name of the recipient?"))
    y += pitch
    doc.lines.append(Line(street, left, y, regular, size))
    ask(_ask(rng, street, "What is the street address?", "What is the address?"))
    y += pitch
    first = rng.random() < 0.5
    doc.lines.append(Line(f"{postcode} {city}" if first else f"{city} {postcode}", left, y, regular, size))
    ask(_ask(rng, city, "What is the city?", "Which city is given?"))
    ask(_ask(rng, postcode, "What is the postcode?"))
    y += 10
    doc.rules.append((left, PAGE - left, y))
    y += pitch - 2
    for name in extras:
        if name == "from":
            doc.lines.append(Line(f"From: {sender}", left, y, regular, 16))
            ask(_ask(rng, sender, "Who sent the parcel?", "What is the name of the sender?"))
        elif name == "weight":
            doc.lines.append(Line(f"Weight: {weight}", left, y, regular, size))
            ask(_ask(rng, weight, "What is the weight?", "How heavy is the parcel?"))
        else:
            doc.lines.append(Line(f"Tracking: {tracking}", left, y, regular, size))
            ask(_ask(rng, tracking, "What is the tracking number?"))
        y += pitch
    doc.description = f"A shipping label to {to} in {city}."
    return doc


def _product_label(rng: random.Random) -> Document:
    doc = Document("label")
    regular, bold = rng.choice(_FAMILIES)
    size = rng.choice((16, 17, 18))
    ask = doc.questions.append
    product = f"{rng.choice(STORE_FIRST)} {rng.choice(ITEMS)}"
    grams = f"{rng.randint(5, 99) * 10} g" if rng.random() < 0.7 else f"{rng.randint(1, 5)}.{rng.randint(1, 9)} kg"
    fields = {
        "Net weight": (grams, ("What is the net weight?", "What is the weight?"), ()),
        "Price": (money := _money(rng.randint(45, 4999)), ("What is the price?", "How much is the product?"), (money[1:],)),
        "Best before": (_date(rng), ("What is the best before date?",), ()),
        "Lot": (_code(rng), ("What is the lot number?",), ()),
        "Made in": (rng.choice(CITIES), ("Where was the product made?",), ()),
        "Energy": (f"{rng.randint(20, 699)} kcal", ("What is the energy?", "How much energy is given?"), ()),
    }
    chosen = rng.sample(list(fields), rng.randint(3, 5))
    pitch = rng.randint(27, 36)
    y = rng.randint(36, max(37, 36 + PAGE - 66 - (len(chosen) + 1) * pitch))
    centred = rng.random() < 0.5
    left = rng.randint(16, 44)
    x, align = (PAGE // 2, "centre") if centred else (left, "left")
    doc.lines.append(Line(product, x, y, bold, 20, align))
    ask(_ask(rng, product, "What is the product?", "What is the name of the product?"))
    y += pitch + 4
    for name in chosen:
        value, phrasings, also = fields[name]
        doc.lines.append(Line(f"{name}: {value}", x, y, regular, size, align))
        ask(_ask(rng, value, *phrasings, also=also))
        y += pitch
    doc.description = f"A product label of {product}."
    return doc
