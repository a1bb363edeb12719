"""An online shop: orders, returns, exchanges, compensation for late deliveries."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from orchestra_envs.parse import ToolCall
from orchestra_envs.service.domains import people
from orchestra_envs.service.domains.people import days, said
from orchestra_envs.service.goals import Domain, Fact, Goal, GoalWriter, Person, call, column, policy_text, references
from orchestra_envs.service.world import World, cents_of, has_words, service_tool, show, usd, world_of
from orchestra_envs.tools import CallContext, ToolArgumentError

POLICY = policy_text(
    company="an online shop",
    agent="the customer service agent",
    person="customer",
    proof="e-mail and postcode",
    public="products",
    rules="""
- An order can be cancelled only while its status is "processing". The refund is the sum of quantity times unit
  price of its lines. Tell the customer the refund.
- An item of a delivered order can be returned within 30 days of delivery (plus customers: 60 days), electronics
  within 14 days whoever the customer is. The refund is quantity times unit price; for electronics 10 percent of it
  is kept as a fee. Tell the customer the refund. If it is too late, refuse and tell the last day on which it could
  have been returned.
- An item can be exchanged for a product of the same category that is in stock. The difference is quantity times
  (new price minus old unit price); below zero it is paid back. Tell the customer the difference. If the new product
  is out of stock, refuse and tell the day on which it is restocked.
- The address of an order can be changed only while it is "processing". For an order that has been shipped, refuse
  to cancel it or to change its address, and tell the day for which delivery is promised.
- For an order delivered 3 or more days after the promised day, a customer who asks gets 2 dollars of store credit
  per day of delay, at most 20, once. Tell the customer the new balance of store credit. For less delay, refuse and
  tell the promised day.
""",
)

Reason = Literal["no_longer_needed", "ordered_by_mistake", "found_cheaper"]
REASONS = {
    "no_longer_needed": "I do not need it any more",
    "ordered_by_mistake": "I ordered it by mistake",
    "found_cheaper": "I found it cheaper elsewhere",
}
PRODUCTS = {
    "electronics": ("headphones", "desk lamp", "web camera", "radio", "keyboard"),
    "clothing": ("rain jacket", "wool scarf", "linen shirt", "leather belt", "sun hat"),
    "kitchen": ("tea kettle", "bread knife", "soup pot", "salad bowl", "spice rack"),
}
COLOURS = ("amber", "black", "cobalt", "green", "ivory", "red", "silver", "white")
RETURN_DAYS, PLUS_RETURN_DAYS, ELECTRONICS_RETURN_DAYS = 30, 60, 14
ELECTRONICS_FEE_PERCENT = 10
LATE_DAYS, CREDIT_CENTS_PER_DAY, MAX_CREDIT_CENTS = 3, 200, 2000


@dataclass(frozen=True, slots=True)
class Customer:
    """A customer; `plus` members may return for longer."""

    id: str
    name: str
    email: str
    postcode: str
    plus: bool
    store_credit_cents: int


@dataclass(frozen=True, slots=True)
class Product:
    """Something the shop sells; `restocked_on` is set while none is in stock."""

    id: str
    name: str
    category: str
    price_cents: int
    stock: int
    restocked_on: dt.date | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A product of an order."""

    product_id: str
    quantity: int
    unit_price_cents: int
    status: str = "bought"


@dataclass(frozen=True, slots=True)
class Order:
    """An order; `status` is processing, shipped, delivered or cancelled."""

    id: str
    customer_id: str
    status: str
    placed: dt.date
    promised: dt.date
    delivered: dt.date | None
    address: str
    lines: tuple[Line, ...]
    paid_back_cents: int = 0
    paid_extra_cents: int = 0
    credited_cents: int = 0
    cancel_reason: str = ""


# The tools.


@service_tool()
def verify_customer(context: CallContext, email: str, postcode: str) -> dict[str, Any]:
    """Establish who the customer is. Returns their record.

    Args:
        email: the e-mail address that the customer states.
        postcode: the five-digit postcode that the customer states.
    """
    proof = {"email": email.strip().lower(), "postcode": postcode.strip()}
    return world_of(context).verify(Customer, "e-mail address and postcode", **proof)


@service_tool()
def get_customer(context: CallContext, customer_id: str) -> dict[str, Any]:
    """The record of a verified customer: plus membership, store credit.

    Args:
        customer_id: such as C-12345.
    """
    return show(world_of(context).find_private(Customer, customer_id))


@service_tool()
def list_orders(context: CallContext, customer_id: str) -> list[dict[str, Any]]:
    """All orders of a verified customer, with their lines.

    Args:
        customer_id: such as C-12345.
    """
    world = world_of(context)
    customer = world.find_private(Customer, customer_id)
    return world.show(world.rows(Order, customer_id=customer.id))


@service_tool()
def get_order(context: CallContext, order_id: str) -> dict[str, Any]:
    """One order of a verified customer: status, days, address, lines.

    Args:
        order_id: such as O-12345.
    """
    return show(_order(world_of(context), order_id))


@service_tool()
def find_products(context: CallContext, words: str) -> list[dict[str, Any]]:
    """Products whose name or category has these words in it.

    Args:
        words: such as "kettle" or "clothing".
    """
    world = world_of(context)
    return world.show(p for p in world.rows(Product) if has_words(f"{p.name} {p.category}", words))


@service_tool()
def get_product(context: CallContext, product_id: str) -> dict[str, Any]:
    """One product: price, category, stock and, if there is none, when it is restocked.

    Args:
        product_id: such as P-123.
    """
    return show(world_of(context).find(Product, product_id))


@service_tool(write=True)
def cancel_order(context: CallContext, order_id: str, reason: Reason, refund_usd: float) -> dict[str, Any]:
    """Cancel an order and pay it back.

    Args:
        order_id: such as O-12345.
        reason: why the customer cancels.
        refund_usd: what is paid back, in dollars.
    """
    world = world_of(context)
    order = _order(world, order_id)
    if order.status == "cancelled":
        raise ToolArgumentError(f"{order_id} is cancelled already")
    cancelled = replace(order, status="cancelled", cancel_reason=reason, paid_back_cents=cents_of(refund_usd))
    return world.put(cancelled)


@service_tool(write=True)
def return_item(context: CallContext, order_id: str, product_id: str, refund_usd: float) -> dict[str, Any]:
    """Take one line of an order back and pay for it.

    Args:
        order_id: such as O-12345.
        product_id: the product of that line.
        refund_usd: what is paid back, in dollars.
    """
    world = world_of(context)
    order = _order(world, order_id)
    line = _line(order, product_id)
    lines = _replaced(order, line, replace(line, status="returned"))
    return world.put(replace(order, lines=lines, paid_back_cents=order.paid_back_cents + cents_of(refund_usd)))


@service_tool(write=True)
def exchange_item(
    context: CallContext, order_id: str, product_id: str, new_product_id: str, difference_usd: float
) -> dict[str, Any]:
    """Exchange one line of an order for another product, in the same quantity.

    Args:
        order_id: such as O-12345.
        product_id: the product that comes back.
        new_product_id: the product that is sent instead.
        difference_usd: what the customer pays on top, in dollars; below zero is paid back.
    """
    world = world_of(context)
    order = _order(world, order_id)
    line = _line(order, product_id)
    product = world.find(Product, new_product_id)
    if product.stock < line.quantity:
        raise ToolArgumentError(f"{new_product_id} is out of stock")
    extra_cents = cents_of(abs(difference_usd))
    paid: dict[str, Any] = {"paid_extra_cents": order.paid_extra_cents + extra_cents}
    if difference_usd < 0:
        paid = {"paid_back_cents": order.paid_back_cents + extra_cents}
    new_line = Line(product.id, line.quantity, product.price_cents, "exchanged")
    world.put(replace(product, stock=product.stock - line.quantity))
    return world.put(replace(order, lines=_replaced(order, line, new_line), **paid))


@service_tool(write=True)
def change_address(context: CallContext, order_id: str, address: str) -> dict[str, Any]:
    """Change where an order is delivered.

    Args:
        order_id: such as O-12345.
        address: number, street and town, as the customer states them.
    """
    world = world_of(context)
    return world.put(replace(_order(world, order_id), address=" ".join(address.replace(",", " ").split())))


@service_tool(write=True)
def change_email(context: CallContext, customer_id: str, email: str) -> dict[str, Any]:
    """Change the e-mail address of a verified customer.

    Args:
        customer_id: such as C-12345.
        email: the new address.
    """
    world = world_of(context)
    customer = world.find_private(Customer, customer_id)
    return world.put(replace(customer, email=email.strip().lower()))


@service_tool(write=True)
def add_store_credit(context: CallContext, order_id: str, amount_usd: float) -> dict[str, Any]:
    """Give the customer of an order store credit as compensation for it, once.

    Args:
        order_id: such as O-12345.
        amount_usd: dollars.
    """
    world = world_of(context)
    order = _order(world, order_id)
    if order.credited_cents:
        raise ToolArgumentError(f"{order_id} was compensated already")
    customer = world.find(Customer, order.customer_id)
    cents = cents_of(amount_usd)
    world.put(replace(order, credited_cents=cents))
    return world.put(replace(customer, store_credit_cents=customer.store_credit_cents + cents))


TOOLS = (
    verify_customer,
    get_customer,
    list_orders,
    get_order,
    find_products,
    get_product,
    cancel_order,
    return_item,
    exchange_item,
    change_address,
    change_email,
    add_store_credit,
)


def _order(world: World, order_id: str) -> Order:
    return world.find_private(Order, order_id, owner="customer_id")


def _line(order: Order, product_id: str) -> Line:
    for line in order.lines:
        if line.product_id == product_id and line.status == "bought":
            return line
    raise ToolArgumentError(f"{order.id} has no line of {product_id!r} that was bought and kept")


def _replaced(order: Order, old: Line, new: Line) -> tuple[Line, ...]:
    return tuple(new if line == old else line for line in order.lines)


# The world.


def make_world(rng: random.Random) -> tuple[World, Person]:
    """A shop with 15 products and 5 customers; the first of them, with 6 orders, is the user."""
    today = people.today(rng)
    products = _products(rng, today)
    customers = _customers(rng)
    order_ids = iter(people.distinct(rng, "O", 30))
    orders = []
    for number, customer in enumerate(customers):
        kinds = ["processing", "processing", "shipped", "recent", "old", "late"] if number == 0 else ["recent", "old"]
        orders += [_random_order(rng, next(order_ids), customer, kind, products, today) for kind in kinds]
    user = customers[0]
    identity = {"email": user.email, "postcode": user.postcode}
    person = people.protagonist(user, identity, call("verify_customer", **identity))
    return World(today, [*products, *customers, *orders]), person


def _products(rng: random.Random, today: dt.date) -> list[Product]:
    names = [(f"{rng.choice(COLOURS)} {noun}", category) for category, nouns in PRODUCTS.items() for noun in nouns]
    products = []
    for product_id, (name, category) in zip(people.distinct(rng, "P", len(names), digits=3), names):
        out_of_stock = rng.random() < 0.25
        restocked_on = today + days(rng.randint(3, 40)) if out_of_stock else None
        price_cents = rng.randrange(450, 19_000, 10)
        products.append(Product(product_id, name, category, price_cents, 0 if out_of_stock else 20, restocked_on))
    return products


def _customers(rng: random.Random) -> list[Customer]:
    return [
        Customer(
            customer_id,
            name,
            people.email_of(rng, name),
            people.postcode(rng),
            rng.random() < 0.4,
            rng.randrange(0, 5000, 25),
        )
        for customer_id, name in people.ids_and_names(rng, "C", 5)
    ]


def _random_order(
    rng: random.Random, order_id: str, customer: Customer, kind: str, products: Sequence[Product], today: dt.date
) -> Order:
    chosen = rng.sample(products, rng.choice((1, 1, 2, 3)))
    lines = tuple(Line(p.id, rng.choice((1, 1, 1, 2, 3)), p.price_cents - rng.choice((0, 0, 20, 50))) for p in chosen)
    ago = {"processing": 1, "shipped": 4, "recent": rng.randint(8, 22), "late": rng.randint(20, 55), "old": 0}[kind]
    placed = today - days(ago or rng.randint(40, 110))
    promised = placed + days(rng.randint(4, 7))
    delivered = None
    if kind in ("recent", "old", "late"):
        delay = rng.randint(1, 13) if kind == "late" else rng.randint(-2, 0)
        delivered = min(promised + days(delay), today - days(1))
    status = kind if delivered is None else "delivered"
    return Order(order_id, customer.id, status, placed, promised, delivered, people.address(rng), lines)


# The goals.


def _total_cents(order: Order) -> int:
    return sum(line.quantity * line.unit_price_cents for line in order.lines)


def _cancel(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for order in world.rows(Order, customer_id=person.id):
        reason = rng.choice(list(REASONS))
        total_cents = _total_cents(order)
        if order.status not in ("processing", "shipped"):
            continue
        words = REASONS[reason]
        goal = partial(
            Goal,
            kind="cancel_order",
            asks=(
                f"Please cancel order {order.id}, {words}. Tell me what I get back; if it cannot be cancelled, tell me "
                "for which day its delivery is promised.",
                f"I want to cancel my order {order.id} because {words}. How much money do I get back? If that is no "
                "longer possible I need to know the promised delivery day.",
            ),
            vague="I would like to cancel one of my orders.",
            known={"order": order.id, "reason": words},
            reads=(call("get_order", order_id=order.id),),
            needs=references(order),
        )
        if order.status == "shipped":
            yield _too_late_for_changes(world, order, "cancel it", goal)
            continue
        arguments = {"order_id": order.id, "reason": reason, "refund_usd": total_cents / 100}
        yield goal(
            outcome="write",
            writes=(call("cancel_order", **arguments),),
            tells=(Fact.amount(total_cents, "How much do I get back for the cancelled order?"),),
            proposal=f"cancel order {order.id} and pay back {usd(total_cents)}",
            reports=(
                f"Order {order.id} has been cancelled and you get {usd(total_cents)} back.",
                f"I have cancelled {order.id}; the refund is {usd(total_cents)}.",
            ),
        )


def _too_late_for_changes(world: World, order: Order, what: str, goal: GoalWriter) -> Goal:
    return goal(
        outcome="refuse",
        tells=(_promised(world, order, "For which day is the delivery promised?"),),
        reports=(
            f"I am sorry, I cannot {what}: order {order.id} has been shipped. It is promised for "
            f"{said(order.promised)}.",
            f"Order {order.id} is on its way already, so it is not possible to {what}. The promised delivery day is "
            f"{order.promised.isoformat()}.",
        ),
    )


def _promised(world: World, order: Order, question: str) -> Fact:
    orders = world.rows(Order, customer_id=order.customer_id)
    return Fact.day(order.promised, question, [other.promised for other in orders])


def _return(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    customer = world.tables[Customer][person.id]
    for order, line, product in _delivered_lines(world, person):
        if product.category == "electronics":
            window_days, fee_percent = ELECTRONICS_RETURN_DAYS, ELECTRONICS_FEE_PERCENT
        else:
            window_days, fee_percent = (PLUS_RETURN_DAYS if customer.plus else RETURN_DAYS), 0
        assert order.delivered is not None
        last_day = order.delivered + days(window_days)
        refund_cents = line.quantity * line.unit_price_cents * (100 - fee_percent) // 100
        goal = partial(
            Goal,
            kind="return_item",
            asks=(
                f"I want to return the {product.name} of order {order.id}. Tell me what I get back; if it is too late, "
                "tell me the last day on which it could have been returned.",
                f"Can the {product.name} from order {order.id} still be sent back? If yes, do it and say how much I "
                "get; if not, say until which day it would have been possible.",
            ),
            vague="I would like to return something I bought.",
            known={"order": order.id, "item": f"the {product.name}"},
            reads=_reads(order, product),
            needs=references(order),
        )
        if world.today > last_day:
            yield _too_late_to_return(product, last_day, goal)
            continue
        arguments = {"order_id": order.id, "product_id": product.id, "refund_usd": refund_cents / 100}
        yield goal(
            outcome="write",
            writes=(call("return_item", **arguments),),
            tells=(Fact.amount(refund_cents, f"How much do I get back for the {product.name}?"),),
            proposal=f"take the {product.name} of order {order.id} back and refund {usd(refund_cents)}",
            reports=(
                f"The return of the {product.name} is registered and {usd(refund_cents)} will be paid back.",
                f"I have registered the return; for the {product.name} you get {usd(refund_cents)}.",
            ),
        )


def _too_late_to_return(product: Product, last_day: dt.date, goal: GoalWriter) -> Goal:
    return goal(
        outcome="refuse",
        tells=(Fact.day(last_day, "Until which day could I have returned it?"),),
        reports=(
            f"I am sorry, I cannot take the {product.name} back: the last day for a return was {said(last_day)}.",
            f"It is not possible to return the {product.name} any more; that ended on {last_day.isoformat()}.",
        ),
    )


def _exchange(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for order, line, product in _delivered_lines(world, person):
        for new in world.rows(Product, category=product.category):
            difference_cents = line.quantity * (new.price_cents - line.unit_price_cents)
            if new.id in {other.product_id for other in order.lines} or difference_cents == 0:
                continue
            goal = partial(
                Goal,
                kind="exchange_item",
                asks=(
                    f"I want to exchange the {product.name} of order {order.id} for the {new.name}. Tell me the "
                    "difference in price; if it is out of stock, tell me when there will be some.",
                    f"Please swap the {product.name} in order {order.id} for the {new.name} and say what the "
                    "difference is. If you have none, I need the day on which it is back.",
                ),
                vague="I would like to exchange something I bought.",
                known={"order": order.id, "item": f"the {product.name}", "new item": f"the {new.name}"},
                reads=(*_reads(order, product), call("find_products", words=new.name)),
                needs=references(order, new),
            )
            yield _exchanged(world, order, product, new, difference_cents, goal)


def _exchanged(
    world: World, order: Order, product: Product, new: Product, difference_cents: int, goal: GoalWriter
) -> Goal:
    if new.restocked_on:
        others = [other.restocked_on for other in world.rows(Product) if other.restocked_on]
        return goal(
            outcome="refuse",
            tells=(Fact.day(new.restocked_on, f"When will the {new.name} be back?", others),),
            reports=(
                f"I am sorry, I cannot make this exchange: the {new.name} is out of stock until "
                f"{said(new.restocked_on)}.",
                f"The exchange is not possible now, there will be a {new.name} again on "
                f"{new.restocked_on.isoformat()}.",
            ),
        )
    words = (
        f"{usd(difference_cents)} more to pay" if difference_cents > 0 else f"{usd(-difference_cents)} paid back to you"
    )
    arguments = {
        "order_id": order.id,
        "product_id": product.id,
        "new_product_id": new.id,
        "difference_usd": difference_cents / 100,
    }
    return goal(
        outcome="write",
        writes=(call("exchange_item", **arguments),),
        tells=(Fact.amount(abs(difference_cents), "What is the difference in price?"),),
        proposal=f"exchange the {product.name} of order {order.id} for the {new.name}, with {words}",
        reports=(
            f"The {product.name} has been exchanged for the {new.name}, with {words}.",
            f"I have arranged the exchange for the {new.name}: {words}.",
        ),
    )


def _change_address(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for order in world.rows(Order, customer_id=person.id):
        new = people.address(rng)
        if order.status not in ("processing", "shipped") or new == order.address:
            continue
        goal = partial(
            Goal,
            kind="change_address",
            asks=(
                f"Please send order {order.id} to {new} instead. If it has left already, tell me for which day it is "
                "promised.",
                f"The delivery address of order {order.id} must be {new}. If that cannot be changed, on which day is "
                "it to arrive?",
            ),
            vague="I would like another delivery address for an order.",
            known={"order": order.id, "address": new},
            reads=(call("get_order", order_id=order.id),),
            needs=references(order),
        )
        if order.status == "shipped":
            yield _too_late_for_changes(world, order, "change the address", goal)
            continue
        yield goal(
            outcome="write",
            writes=(call("change_address", order_id=order.id, address=new),),
            proposal=f"send order {order.id} to {new}",
            reports=(
                f"The address of order {order.id} has been changed to {new}.",
                f"I have updated the address: {order.id} goes to {new}.",
            ),
        )


def _late_credit(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    customer = world.tables[Customer][person.id]
    for order in world.rows(Order, customer_id=person.id, status="delivered"):
        assert order.delivered is not None
        late_days = (order.delivered - order.promised).days
        credit_cents = min(late_days * CREDIT_CENTS_PER_DAY, MAX_CREDIT_CENTS)
        balance_cents = customer.store_credit_cents + credit_cents
        goal = partial(
            Goal,
            kind="late_credit",
            asks=(
                f"Order {order.id} came late and I would like compensation. Tell me my new balance of store credit; "
                "if I get nothing, tell me for which day the order had been promised.",
                f"I waited too long for order {order.id}. What can I get for it, and what is my store credit then? If "
                "there is nothing to get, for which day was it promised?",
            ),
            vague="One of my orders came late and I would like compensation.",
            known={"order": order.id},
            reads=(call("get_order", order_id=order.id),),
            needs=references(order),
        )
        if late_days < LATE_DAYS:
            yield _not_late_enough(world, order, goal)
            continue
        yield goal(
            outcome="write",
            writes=(call("add_store_credit", order_id=order.id, amount_usd=credit_cents / 100),),
            tells=(Fact.amount(balance_cents, "What is my balance of store credit now?"),),
            proposal=f"add {usd(credit_cents)} of store credit for order {order.id}, which makes {usd(balance_cents)}",
            reports=(
                f"I have added {usd(credit_cents)}; your store credit is {usd(balance_cents)} now.",
                f"Your compensation has been entered, and the balance of your store credit is {usd(balance_cents)}.",
            ),
        )


def _not_late_enough(world: World, order: Order, goal: GoalWriter) -> Goal:
    return goal(
        outcome="refuse",
        tells=(_promised(world, order, "For which day had it been promised?"),),
        reports=(
            f"I am sorry, I cannot give compensation for {order.id}: it was promised for "
            f"{said(order.promised)} and was not late enough.",
            f"Compensation is not possible for {order.id}. The promised day was {order.promised.isoformat()}.",
        ),
    )


def _change_email(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for new in people.new_values(lambda: people.email_of(rng, person.name), person.known["email"]):
        yield Goal(
            kind="change_email",
            outcome="write",
            asks=(
                f"Please change my e-mail address to {new}.",
                f"I have a new e-mail address, {new}: please enter it.",
            ),
            vague="I would like to change my e-mail address.",
            known={"new email": new},
            writes=(call("change_email", customer_id=person.id, email=new),),
            proposal=f"change your e-mail address to {new}",
            reports=(
                f"Your e-mail address has been changed to {new}.",
                f"I have updated your e-mail address to {new}.",
            ),
        )


def _spending(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    orders = world.rows(Order, customer_id=person.id)
    since = world.today - days(rng.randint(6, 40))
    recent = [order for order in orders if order.placed >= since and order.status != "cancelled"]
    total_cents = sum(map(_total_cents, recent))
    if len(recent) >= 2:
        yield Goal(
            kind="spending",
            outcome="inform",
            asks=(
                f"How much did I spend altogether on orders placed on {said(since)} or later?",
                f"Tell me the total of all my orders placed since {since.isoformat()}, that day included.",
            ),
            known={"day": said(since)},
            reads=(call("list_orders", customer_id=person.id),),
            tells=(Fact.amount(total_cents, "What is the total of those orders?"),),
            reports=(
                f"Your orders since then come to {usd(total_cents)} altogether.",
                f"The total of these orders is {usd(total_cents)}.",
            ),
            needs=references(*orders),
        )


def _product_price(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for product in world.rows(Product):
        quantity = rng.randint(2, 6)
        total_cents = quantity * product.price_cents
        yield Goal(
            kind="product_price",
            outcome="inform",
            asks=(
                f"What would {quantity} pieces of the {product.name} cost altogether?",
                f"Tell me the price of {quantity} times the {product.name}, please.",
            ),
            known={"item": f"the {product.name}"},
            reads=(call("find_products", words=product.name),),
            tells=(Fact.amount(total_cents, "What do they cost altogether?"),),
            reports=(
                f"{quantity} of the {product.name} cost {usd(total_cents)}.",
                f"That would be {usd(total_cents)} altogether.",
            ),
            needs=references(product),
            needs_identity=False,
        )


def _delivered_lines(world: World, person: Person) -> Iterator[tuple[Order, Line, Product]]:
    for order in world.rows(Order, customer_id=person.id, status="delivered"):
        for line in order.lines:
            yield order, line, world.tables[Product][line.product_id]


def _reads(order: Order, product: Product) -> tuple[ToolCall, ...]:
    return (call("get_order", order_id=order.id), call("find_products", words=product.name))


DOMAIN = Domain(
    name="shop",
    policy=POLICY,
    tools=TOOLS,
    make_world=make_world,
    goals={
        "cancel_order": _cancel,
        "return_item": _return,
        "exchange_item": _exchange,
        "change_address": _change_address,
        "late_credit": _late_credit,
        "change_email": _change_email,
        "spending": _spending,
        "product_price": _product_price,
    },
    changeable=("cancel_order", "return_item", "exchange_item", "change_address", "change_email"),
    alternatives={
        "order_id": column(Order),
        "product_id": column(Product),
        "new_product_id": column(Product),
        "customer_id": column(Customer),
        "reason": tuple(REASONS),
        "address": column(Order, "address"),
        "email": ("nobody@mail.example",),
    },
)
