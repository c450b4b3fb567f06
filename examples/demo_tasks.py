"""What the demo adapters learn: examples made from templates with a seeded random generator, and how an answer is judged.

An example is a chat (system and user message) and the answer wanted. Held-out examples are drawn after the training set from the same
templates; none of their user messages occurs in training, and the product names of the held-out tickets do not either.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Example(NamedTuple):
    system: str
    """Empty: the chat template's own system message."""
    user: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user}]


def distinct(make: Callable[[], Example], count: int, excluded: set[str]) -> Iterator[Example]:
    """Yield `count` examples with different user messages, none in `excluded`; adds theirs to it."""
    while count:
        example = make()
        if example.user not in excluded:
            excluded.add(example.user)
            count -= 1
            yield example


# Support ticket -> JSON

TICKETS_SYSTEM = "Ticket to JSON: category, priority, product, order_id, refund"

COMPLAINTS = {
    "billing": [
        "I was charged twice for the {product}.",
        "The invoice for my {product} shows the wrong amount.",
        "My card was billed again for the {product}.",
        "There is an extra fee on the bill for the {product}.",
    ],
    "delivery": [
        "My {product} has not arrived yet.",
        "The parcel with the {product} is late.",
        "The courier left my {product} at the wrong address.",
        "Tracking for the {product} has not moved in a week.",
    ],
    "defect": [
        "The {product} stopped working after two days.",
        "My {product} arrived broken.",
        "The {product} makes a loud noise and will not turn on.",
        "There is a crack in the {product}.",
    ],
    "account": [
        "I cannot log in to see my order of the {product}.",
        "My password no longer works, so I can't register the {product}.",
        "The account with my {product} is locked.",
        "I need to change the email address on the account for the {product}.",
    ],
    "question": [
        "Does the {product} come in blue?",
        "How do I clean the {product}?",
        "Is the {product} safe for children?",
        "Where can I find the manual of the {product}?",
    ],
}
URGENCY = {
    "low": ["There is no hurry.", "Answer whenever you have time.", "This can wait."],
    "normal": ["", "Please look into it.", "Thanks for your help."],
    "high": ["This is urgent!", "I need this solved today.", "Please answer as soon as possible!"],
}
REFUND = {
    True: ["I want my money back.", "Please refund me.", "I would like a refund."],
    False: ["", "I do not need a refund.", "I would like to keep it."],
}
ORDER = ["My order number is {order}.", "Order {order}.", "It is order #{order}.", "The order is {order}."]
GREETING = ["Hello,", "Hi,", "Dear team,", "Good morning,", ""]
MAKES = ["Aero", "Nova", "Luma", "Orbit", "Pico", "Terra", "Vento", "Zen", "Astra", "Delta"]
THINGS = ["Kettle", "Lamp", "Blender", "Heater", "Speaker", "Toaster", "Vacuum", "Router", "Camera", "Scale"]
PRODUCTS = [f"{make} {thing}" for make in MAKES for thing in THINGS]
HELD_OUT_PRODUCTS = PRODUCTS[3::7]
TRAINED_PRODUCTS = sorted(set(PRODUCTS) - set(HELD_OUT_PRODUCTS))


def ticket(rng: random.Random, products: list[str]) -> Example:
    category, priority = rng.choice(sorted(COMPLAINTS)), rng.choice(sorted(URGENCY))
    product, order, refund = rng.choice(products), rng.randrange(10000, 100000), rng.random() < 0.4
    complaint = rng.choice(COMPLAINTS[category]).format(product=product)
    rest = [rng.choice(URGENCY[priority]), rng.choice(REFUND[refund]), rng.choice(ORDER).format(order=order)]
    rng.shuffle(rest)
    text = " ".join(part for part in [rng.choice(GREETING), complaint, *rest] if part)
    fields = {"category": category, "priority": priority, "product": product, "order_id": order, "refund": refund}
    return Example(TICKETS_SYSTEM, text, json.dumps(fields))


def tickets(rng: random.Random, num_train: int, num_held_out: int) -> tuple[list[Example], list[Example]]:
    seen: set[str] = set()
    train = list(distinct(lambda: ticket(rng, TRAINED_PRODUCTS), num_train, seen))
    return train, list(distinct(lambda: ticket(rng, HELD_OUT_PRODUCTS), num_held_out, seen))


def same_json(got: str, wanted: str) -> bool:
    try:
        return bool(json.loads(got) == json.loads(wanted))
    except ValueError:
        return False


TICKETS_SCHEMA = {
    "type": "object",
    "properties": {
        "category": {"type": "string", "enum": sorted(COMPLAINTS)},
        "priority": {"type": "string", "enum": list(URGENCY)},
        "product": {"type": "string"},
        "order_id": {"type": "integer"},
        "refund": {"type": "boolean"},
    },
    "required": ["category", "priority", "product", "order_id", "refund"],
    "additionalProperties": False,
}


# Question -> SQL

SQL_SCHEMA = "customers(id, name, city, joined_year), orders(id, customer_id, product, amount, status, year)"
SQL_SYSTEM = f"Question to SQL over {SQL_SCHEMA}"
JOIN = "FROM customers JOIN orders ON orders.customer_id = customers.id"

QUERIES = [
    (
        ["How many customers live in {city}?", "Count the customers in {city}."],
        "SELECT COUNT(*) FROM customers WHERE city = '{city}';",
    ),
    (
        ["What are the names of the customers in {city}?", "List the customers from {city} by name."],
        "SELECT name FROM customers WHERE city = '{city}' ORDER BY name;",
    ),
    (
        ["Who joined after {year}?", "Which customers joined later than {year}?"],
        "SELECT name FROM customers WHERE joined_year > {year};",
    ),
    (
        ["What is the total amount of {status} orders in {year}?", "Sum up the {status} orders of {year}."],
        "SELECT SUM(amount) FROM orders WHERE status = '{status}' AND year = {year};",
    ),
    (
        ["How many orders of the {product} were {status}?", "Count the {status} orders of the {product}."],
        "SELECT COUNT(*) FROM orders WHERE product = '{product}' AND status = '{status}';",
    ),
    (
        ["Which customers ordered the {product}?", "Who bought the {product}?"],
        f"SELECT DISTINCT customers.name {JOIN} WHERE orders.product = '{{product}}';",
    ),
    (
        ["Show the {count} largest orders of {year}.", "What were the {count} biggest orders in {year}?"],
        "SELECT id, amount FROM orders WHERE year = {year} ORDER BY amount DESC LIMIT {count};",
    ),
    (
        ["How much did customers in {city} spend in {year}?", "What is the revenue from {city} in {year}?"],
        f"SELECT SUM(orders.amount) {JOIN} WHERE customers.city = '{{city}}' AND orders.year = {{year}};",
    ),
    (
        ["Which orders are over {amount} euros?", "List the orders above {amount} euros."],
        "SELECT id FROM orders WHERE amount > {amount};",
    ),
    (
        ["What is the average amount per product in {year}?", "Average the orders of {year} by product."],
        "SELECT product, AVG(amount) FROM orders WHERE year = {year} GROUP BY product;",
    ),
]
CITIES = ["Berlin", "Lisbon", "Oslo", "Madrid", "Vienna", "Prague", "Dublin", "Athens", "Rome", "Zurich", "Warsaw", "Ghent"]
GOODS = ["kettle", "lamp", "blender", "heater", "speaker", "toaster", "vacuum", "router", "camera", "scale", "desk", "chair"]
STATUSES = ["open", "paid", "shipped", "cancelled", "returned"]


def sql_question(rng: random.Random) -> Example:
    phrasings, query = rng.choice(QUERIES)
    values = {
        "city": rng.choice(CITIES),
        "product": rng.choice(GOODS),
        "status": rng.choice(STATUSES),
        "year": rng.randrange(2010, 2026),
        "count": rng.randrange(2, 10),
        "amount": 25 * rng.randrange(1, 40),
    }
    return Example(SQL_SYSTEM, rng.choice(phrasings).format(**values), query.format(**values))


def sql(rng: random.Random, num_train: int, num_held_out: int) -> tuple[list[Example], list[Example]]:
    seen: set[str] = set()
    train = list(distinct(lambda: sql_question(rng), num_train, seen))
    return train, list(distinct(lambda: sql_question(rng), num_held_out, seen))


def same_sql(got: str, wanted: str) -> bool:
    def plain(query: str) -> str:
        return " ".join(query.replace(";", " ").split()).lower()

    return plain(got) == plain(wanted)


# Talks like a pirate: the base model's own answers, rewritten word by word

TOPICS = [
    *["the moon", "rain", "coffee", "music", "history", "a volcano", "gravity", "chess", "bread", "the internet", "a robot", "sleep"],
    *["winter", "a library", "football", "honey", "a bicycle", "photography", "the desert", "money", "a garden", "mathematics"],
    *["whales", "friendship", "tea", "a train", "the heart", "glass", "wind", "a museum"],
]
HELD_OUT_TOPICS = ["the sun", "chocolate", "a computer", "poetry", "an earthquake", "soap", "a forest", "the brain", "salt", "a bridge"]
ASKS = ["What is {topic}?", "Tell me something about {topic}.", "Why is {topic} important?", "Explain {topic} to a child."]
HELD_OUT_ASKS = ["What is {topic}?", "What should I know about {topic}?"]
OPENERS = ["Arr, matey!", "Ahoy, matey!", "Arr, me hearty!"]
CLOSERS = ["Yo ho ho!", "Aye, that be the truth!", "Shiver me timbers!"]
PIRATE_WORDS = (
    {"is": "be", "are": "be", "am": "be", "was": "were", "you": "ye", "your": "yer", "my": "me", "yes": "aye", "hello": "ahoy"}
    | {"friend": "matey", "friends": "mateys", "people": "landlubbers", "person": "landlubber", "money": "doubloons", "it's": "'tis"}
    | {"for": "fer", "of": "o'"}
)
MARKERS = re.compile(r"\b(arr+|ahoy|matey|mateys|hearty|hearties|aye|ye|yer|landlubbers?|doubloons|shiver|yo ho)\b", re.I)


def pirate_prompts(rng: random.Random) -> tuple[list[Example], list[Example]]:
    train = [Example("", ask.format(topic=topic), "") for topic in TOPICS for ask in ASKS]
    rng.shuffle(train)
    return train[:80], [Example("", ask.format(topic=topic), "") for topic in HELD_OUT_TOPICS for ask in HELD_OUT_ASKS]


def pirate_answer(plain: str, rng: random.Random) -> str:
    """Rewrite the first sentence of `plain` as a pirate would say it."""
    words = " ".join(plain.split())
    sentence = re.match(r"[^.!?]+[.!?]", words)
    body = sentence.group() if sentence else words
    body = re.sub(r"[A-Za-z']+", lambda word: pirate_word(word.group()), body)
    return f"{rng.choice(OPENERS)} {body} {rng.choice(CLOSERS)}"


def pirate_word(word: str) -> str:
    other = PIRATE_WORDS.get(word.lower(), word)
    if not word[0].isupper() or other == word:
        return other
    return other[0].upper() + other[1:]


def is_pirate(text: str) -> bool:
    """At least two different pirate words."""
    return len({match.group().lower() for match in MARKERS.finditer(text)}) >= 2
