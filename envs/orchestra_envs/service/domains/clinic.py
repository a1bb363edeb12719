"""A clinic: appointments, referrals, fees for late changes, repeat prescriptions."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orchestra_envs.service.domains import people
from orchestra_envs.service.domains.people import days, said
from orchestra_envs.service.goals import Domain, Fact, Goal, GoalWriter, Person, call, column, policy_text, references
from orchestra_envs.service.world import World, cents_of, day_of, new_id, service_tool, show, usd, world_of
from orchestra_envs.tools import CallContext, ToolArgumentError

POLICY = policy_text(
    company="a clinic",
    agent="the reception agent",
    person="patient",
    proof="patient number and date of birth",
    public="doctors",
    rules="""
- Doctors of general practice can be booked by everybody, those of another specialty only by patients whose record
  has a referral for it. Without a referral, refuse the booking and tell the day of the earliest free slot with any
  doctor of general practice.
- Book the earliest free slot that fits what the patient asked for. Tell the patient the day and the time.
- Moving or cancelling an appointment costs 25 dollars if the appointment is today, tomorrow or the day after;
  otherwise nothing. Premium patients pay 10 dollars instead of 25. Tell the patient the fee if there is one, and
  after moving an appointment its new day.
- A move keeps the doctor and goes to that doctor's earliest free slot that fits.
- A prescription can be refilled from 5 days before the supply of the last filling ends (day of the last filling
  plus days of supply). Until then, refuse and tell the first possible day. A refill can be picked up two days from
  today; tell the patient that day.
- Of the doctor's fee, patients pay 60 percent, premium patients 20 percent.
""",
)

SPECIALTIES = ("general practice", "dermatology", "cardiology", "neurology")
DRUGS = ("Alvetin", "Borazol", "Cindrine", "Domexal", "Evoprin", "Fentolis", "Garvadin", "Helumab")
TIMES = ("08:20", "09:10", "09:50", "10:40", "11:30", "13:20", "14:10", "15:50", "16:40")
LATE_CHANGE_DAYS, FEE_CENTS, PREMIUM_FEE_CENTS = 2, 2500, 1000
EARLY_REFILL_DAYS, PICKUP_DAYS = 5, 2
SHARE_PERCENT, PREMIUM_SHARE_PERCENT = 60, 20


@dataclass(frozen=True, slots=True)
class Patient:
    """A patient; `referrals` are specialties."""

    id: str
    name: str
    birth_date: dt.date
    phone: str
    premium: bool
    referrals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Doctor:
    """A doctor and the fee of one appointment."""

    id: str
    name: str
    specialty: str
    fee_cents: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A time at which a doctor sees patients."""

    id: str
    doctor_id: str
    day: dt.date
    time: str
    free: bool


@dataclass(frozen=True, slots=True)
class Appointment:
    """A booked slot; `status` is booked or cancelled."""

    id: str
    patient_id: str
    doctor_id: str
    slot_id: str
    day: dt.date
    time: str
    status: str
    charged_cents: int = 0


@dataclass(frozen=True, slots=True)
class Prescription:
    """A repeat prescription."""

    id: str
    patient_id: str
    drug: str
    last_filled: dt.date
    days_of_supply: int
    refills_left: int
    pickup_day: dt.date | None = None


# The tools.


@service_tool()
def verify_patient(context: CallContext, patient_id: str, birth_date: str) -> dict[str, Any]:
    """Establish who the patient is. Returns their record.

    Args:
        patient_id: such as PT-12345.
        birth_date: YYYY-MM-DD.
    """
    proof = {"id": patient_id.strip().upper(), "birth_date": day_of(birth_date)}
    return world_of(context).verify(Patient, "number and date of birth", **proof)


@service_tool()
def get_patient(context: CallContext, patient_id: str) -> dict[str, Any]:
    """The record of a verified patient: premium, referrals, telephone.

    Args:
        patient_id: such as PT-12345.
    """
    return show(world_of(context).find_private(Patient, patient_id))


@service_tool()
def list_doctors(context: CallContext, specialty: str = "") -> list[dict[str, Any]]:
    """Doctors with their fees.

    Args:
        specialty: general practice, dermatology, cardiology or neurology; all doctors if left out.
    """
    world = world_of(context)
    return world.show(doctor for doctor in world.rows(Doctor) if specialty.lower() in ("", doctor.specialty))


@service_tool()
def list_free_slots(context: CallContext, doctor_id: str, from_day: str) -> list[dict[str, Any]]:
    """The next free slots of a doctor, earliest first, five at most.

    Args:
        doctor_id: such as D-123.
        from_day: YYYY-MM-DD; slots on that day and later.
    """
    world = world_of(context)
    world.find(Doctor, doctor_id)
    return world.show(_free_slots(world, doctor_id, day_of(from_day))[:5])


@service_tool()
def list_appointments(context: CallContext, patient_id: str) -> list[dict[str, Any]]:
    """All appointments of a verified patient.

    Args:
        patient_id: such as PT-12345.
    """
    world = world_of(context)
    patient = world.find_private(Patient, patient_id)
    return world.show(world.rows(Appointment, patient_id=patient.id))


@service_tool()
def get_appointment(context: CallContext, appointment_id: str) -> dict[str, Any]:
    """One appointment of a verified patient.

    Args:
        appointment_id: such as A-12345.
    """
    return show(world_of(context).find_private(Appointment, appointment_id, owner="patient_id"))


@service_tool()
def list_prescriptions(context: CallContext, patient_id: str) -> list[dict[str, Any]]:
    """The repeat prescriptions of a verified patient.

    Args:
        patient_id: such as PT-12345.
    """
    world = world_of(context)
    patient = world.find_private(Patient, patient_id)
    return world.show(world.rows(Prescription, patient_id=patient.id))


@service_tool(write=True)
def book_appointment(context: CallContext, patient_id: str, slot_id: str) -> dict[str, Any]:
    """Book a free slot for a verified patient.

    Args:
        patient_id: such as PT-12345.
        slot_id: such as S-12345.
    """
    world = world_of(context)
    patient = world.find_private(Patient, patient_id)
    slot = _take(world, slot_id)
    appointment_id = new_id("A", patient.id, slot.id)
    return world.put(Appointment(appointment_id, patient.id, slot.doctor_id, slot.id, slot.day, slot.time, "booked"))


@service_tool(write=True)
def move_appointment(context: CallContext, appointment_id: str, slot_id: str, fee_usd: float) -> dict[str, Any]:
    """Move an appointment to another free slot.

    Args:
        appointment_id: such as A-12345.
        slot_id: the new slot, such as S-12345.
        fee_usd: what the patient is charged for the change, in dollars; 0 for nothing.
    """
    world = world_of(context)
    appointment = _booked(world, appointment_id)
    cents = cents_of(fee_usd)
    new = _take(world, slot_id)
    _release(world, appointment.slot_id)
    moved = replace(appointment, slot_id=new.id, doctor_id=new.doctor_id, day=new.day, time=new.time)
    return world.put(replace(moved, charged_cents=appointment.charged_cents + cents))


@service_tool(write=True)
def cancel_appointment(context: CallContext, appointment_id: str, fee_usd: float) -> dict[str, Any]:
    """Cancel an appointment.

    Args:
        appointment_id: such as A-12345.
        fee_usd: what the patient is charged for it, in dollars; 0 for nothing.
    """
    world = world_of(context)
    appointment = _booked(world, appointment_id)
    charged_cents = appointment.charged_cents + cents_of(fee_usd)
    _release(world, appointment.slot_id)
    return world.put(replace(appointment, status="cancelled", charged_cents=charged_cents))


@service_tool(write=True)
def refill_prescription(context: CallContext, prescription_id: str, pickup_day: str) -> dict[str, Any]:
    """Order a refill of a repeat prescription.

    Args:
        prescription_id: such as RX-12345.
        pickup_day: YYYY-MM-DD.
    """
    world = world_of(context)
    prescription = world.find_private(Prescription, prescription_id, owner="patient_id")
    if prescription.pickup_day:
        raise ToolArgumentError(f"a refill of {prescription_id} is ordered already")
    if prescription.refills_left < 1:
        raise ToolArgumentError(f"{prescription_id} has no refills left")
    left = prescription.refills_left - 1
    return world.put(replace(prescription, refills_left=left, pickup_day=day_of(pickup_day)))


@service_tool(write=True)
def change_phone(context: CallContext, patient_id: str, phone: str) -> dict[str, Any]:
    """Change the telephone number of a verified patient.

    Args:
        patient_id: such as PT-12345.
        phone: such as 555-1234.
    """
    world = world_of(context)
    patient = world.find_private(Patient, patient_id)
    return world.put(replace(patient, phone=phone.strip()))


TOOLS = (
    verify_patient,
    get_patient,
    list_doctors,
    list_free_slots,
    list_appointments,
    get_appointment,
    list_prescriptions,
    book_appointment,
    move_appointment,
    cancel_appointment,
    refill_prescription,
    change_phone,
)


def _booked(world: World, appointment_id: str) -> Appointment:
    return world.find_private(Appointment, appointment_id, owner="patient_id", status="booked")


def _free_slots(world: World, doctor_id: str, from_day: dt.date) -> list[Slot]:
    first = max(from_day, world.today + days(1))
    slots = [slot for slot in world.rows(Slot, doctor_id=doctor_id, free=True) if slot.day >= first]
    return sorted(slots, key=lambda slot: (slot.day, slot.time))


def _take(world: World, slot_id: str) -> Slot:
    slot = world.find(Slot, slot_id)
    if not slot.free or slot.day <= world.today:
        raise ToolArgumentError(f"{slot_id} is not free")
    world.put(replace(slot, free=False))
    return slot


def _release(world: World, slot_id: str) -> None:
    world.put(replace(world.find(Slot, slot_id), free=True))


# The world.


def make_world(rng: random.Random) -> tuple[World, Person]:
    """A clinic with 7 doctors and 4 patients; the first of them is the user."""
    today = people.today(rng)
    doctors = _doctors(rng)
    slots = _slots(rng, doctors, today)
    patients = _patients(rng)
    appointment_ids = iter(people.distinct(rng, "A", 20))
    appointments = []
    for patient, count in zip(patients, (4, 1, 1, 1)):
        for slot in rng.sample([slot for slot in slots if slot.free], count):
            slots[slots.index(slot)] = replace(slot, free=False)
            appointments.append(
                Appointment(next(appointment_ids), patient.id, slot.doctor_id, slot.id, slot.day, slot.time, "booked")
            )
    records = [*doctors, *slots, *patients, *appointments, *_prescriptions(rng, patients, today)]
    user = patients[0]
    verification = call("verify_patient", patient_id=user.id, birth_date=user.birth_date.isoformat())
    identity = {"patient number": user.id, "birth date": said(user.birth_date)}
    return World(today, records), people.protagonist(user, identity, verification)


def _doctors(rng: random.Random) -> list[Doctor]:
    names = rng.sample(people.LAST_NAMES, 7)
    ids = people.distinct(rng, "D", 7, digits=3)
    specialties = (*SPECIALTIES, *SPECIALTIES[:3])
    return [Doctor(*row, rng.randrange(6000, 24_000, 500)) for row in zip(ids, names, specialties)]


def _slots(rng: random.Random, doctors: Sequence[Doctor], today: dt.date) -> list[Slot]:
    ids = iter(people.distinct(rng, "S", 200))
    slots = []
    for doctor in doctors:
        for offset in sorted(rng.sample(range(1, 30), 9)):
            time = rng.choice(TIMES)
            slots.append(Slot(next(ids), doctor.id, today + days(offset), time, rng.random() < 0.75))
    return slots


def _patients(rng: random.Random) -> list[Patient]:
    return [
        Patient(
            patient_id,
            name,
            dt.date(rng.randint(1940, 2005), rng.randint(1, 12), rng.randint(1, 28)),
            people.phone(rng),
            rng.random() < 0.4,
            tuple(rng.sample(SPECIALTIES[1:], rng.choice((1, 1, 2)))),
        )
        for patient_id, name in people.ids_and_names(rng, "PT", 4)
    ]


def _prescriptions(rng: random.Random, patients: Sequence[Patient], today: dt.date) -> list[Prescription]:
    ids = iter(people.distinct(rng, "RX", 20))
    prescriptions = []
    for patient, count in zip(patients, (3, 1, 1, 1)):
        for drug in rng.sample(DRUGS, count):
            supply_days = rng.choice((28, 30, 60, 90))
            filled = today - days(rng.randint(max(1, supply_days - 25), supply_days + 10))
            prescriptions.append(Prescription(next(ids), patient.id, drug, filled, supply_days, rng.randint(1, 5)))
    return prescriptions


# The goals.


def _book(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    patient = world.tables[Patient][person.id]
    for doctor in world.rows(Doctor):
        start = world.today + days(rng.randint(2, 15))
        slot = _earliest(world, doctor.id, start)
        if slot is None:
            continue
        goal = partial(
            Goal,
            kind="book_appointment",
            asks=(
                f"I would like the earliest appointment with Doctor {doctor.name} on {said(start)} or later. Tell me "
                "day and time; if I cannot have one, tell me when a general practitioner is free first.",
                f"Please book me with Doctor {doctor.name}, as early as possible but not before {start.isoformat()}, "
                "and say when it is. If that is not allowed, which is the first day with a general practitioner?",
            ),
            vague="I need an appointment.",
            known={"doctor": f"Doctor {doctor.name}", "day": f"{said(start)} or later"},
            needs=references(doctor),
        )
        if doctor.specialty in ("general practice", *patient.referrals):
            yield _booked_goal(person, doctor, slot, start, goal)
        else:
            yield _without_referral(world, doctor, goal)


def _booked_goal(person: Person, doctor: Doctor, slot: Slot, start: dt.date, goal: GoalWriter) -> Goal:
    when = f"{said(slot.day)} at {slot.time}"
    return goal(
        outcome="write",
        reads=(
            call("list_doctors"),
            call("list_free_slots", doctor_id=doctor.id, from_day=start.isoformat()),
        ),
        writes=(call("book_appointment", patient_id=person.id, slot_id=slot.id),),
        tells=(
            Fact.day(slot.day, f"On which day do I see Doctor {doctor.name}?"),
            Fact("time", slot.time, f"At what time do I see Doctor {doctor.name}?"),
        ),
        proposal=f"book Doctor {doctor.name} on {when}",
        reports=(
            f"Your appointment with Doctor {doctor.name} has been booked for {when}.",
            f"I have booked you: Doctor {doctor.name}, {slot.day.isoformat()}, {slot.time}.",
        ),
    )


def _without_referral(world: World, doctor: Doctor, goal: GoalWriter) -> Goal:
    practitioners = world.rows(Doctor, specialty="general practice")
    slots = [slot for other in practitioners for slot in _free_slots(world, other.id, world.today)]
    first = min(slot.day for slot in slots)
    reads = [call("list_doctors")]
    for other in practitioners:
        reads.append(call("list_free_slots", doctor_id=other.id, from_day=world.today.isoformat()))
    return goal(
        outcome="refuse",
        reads=tuple(reads),
        tells=(
            Fact.day(first, "On which day is a general practitioner free first?", sorted({slot.day for slot in slots})),
        ),
        reports=(
            f"I am sorry, I cannot book Doctor {doctor.name} without a referral for {doctor.specialty}. The first "
            f"free day with a general practitioner is {said(first)}.",
            f"An appointment with Doctor {doctor.name} is not possible without a referral for {doctor.specialty}; a "
            f"general practitioner is free on {first.isoformat()}.",
        ),
    )


def _earliest(world: World, doctor_id: str, from_day: dt.date) -> Slot | None:
    """A doctor's first free slot; None if there is none, or two at the same time."""
    slots = _free_slots(world, doctor_id, from_day)
    times = [(slot.day, slot.time) for slot in slots[:2]]
    return slots[0] if len(set(times)) == len(times) > 0 else None


def _booked_of(world: World, person: Person) -> list[Appointment]:
    return world.rows(Appointment, patient_id=person.id, status="booked")


def _fee_cents(world: World, person: Person, appointment: Appointment) -> int:
    if (appointment.day - world.today).days > LATE_CHANGE_DAYS:
        return 0
    return PREMIUM_FEE_CENTS if world.tables[Patient][person.id].premium else FEE_CENTS


def _move(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for appointment in _booked_of(world, person):
        start = appointment.day + days(rng.randint(1, 8))
        slot, fee_cents = _earliest(world, appointment.doctor_id, start), _fee_cents(world, person, appointment)
        if slot is None:
            continue
        cost = f"for a fee of {usd(fee_cents)}" if fee_cents else "without a fee"
        arguments = {"appointment_id": appointment.id, "slot_id": slot.id, "fee_usd": fee_cents / 100}
        tells = [Fact.day(slot.day, "What is the new day?")]
        tells += [Fact.amount(fee_cents, "What does moving it cost?")] if fee_cents else []
        yield Goal(
            kind="move_appointment",
            outcome="write",
            asks=(
                f"Please move my appointment {appointment.id} to the earliest slot of the same doctor on "
                f"{said(start)} or later. Tell me the new day and the fee, if there is one.",
                f"I cannot come to appointment {appointment.id}. What is the doctor's first free slot not before "
                f"{start.isoformat()}? Move me there and tell me the day, and what it costs if it does.",
            ),
            vague="I would like to move an appointment.",
            known={"appointment": appointment.id, "day": f"{said(start)} or later"},
            reads=(
                call("get_appointment", appointment_id=appointment.id),
                call("list_free_slots", doctor_id=appointment.doctor_id, from_day=start.isoformat()),
            ),
            writes=(call("move_appointment", **arguments),),
            tells=tuple(tells),
            proposal=f"move appointment {appointment.id} to {said(slot.day)} at {slot.time} {cost}",
            reports=(
                f"Appointment {appointment.id} has been moved to {said(slot.day)} at {slot.time} {cost}.",
                f"I have moved it {cost}; the new slot is {slot.day.isoformat()}, {slot.time}.",
            ),
        )


def _cancel(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for appointment in _booked_of(world, person):
        fee_cents = _fee_cents(world, person, appointment)
        cost = f"for a fee of {usd(fee_cents)}" if fee_cents else "without a fee"
        arguments = {"appointment_id": appointment.id, "fee_usd": fee_cents / 100}
        yield Goal(
            kind="cancel_appointment",
            outcome="write",
            asks=(
                f"Please cancel my appointment {appointment.id}. If there is a fee, tell me how much.",
                f"I do not need appointment {appointment.id} any more, cancel it. What does that cost, if anything?",
            ),
            vague="I would like to cancel an appointment.",
            known={"appointment": appointment.id},
            reads=(call("get_appointment", appointment_id=appointment.id),),
            writes=(call("cancel_appointment", **arguments),),
            tells=(Fact.amount(fee_cents, "What does cancelling cost?"),) if fee_cents else (),
            proposal=f"cancel appointment {appointment.id} {cost}",
            reports=(
                f"Appointment {appointment.id} has been cancelled {cost}.",
                f"I have cancelled {appointment.id} {cost}.",
            ),
        )


def _refill(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    for prescription in world.rows(Prescription, patient_id=person.id):
        first = prescription.last_filled + days(prescription.days_of_supply - EARLY_REFILL_DAYS)
        drug = prescription.drug
        goal = partial(
            Goal,
            kind="refill",
            asks=(
                f"I need a refill of {drug}. Tell me on which day I can pick it up; if it is too early, tell me the "
                "first day on which I can order it.",
                f"Please refill my {drug} prescription and say when it is ready. If that is not possible yet, from "
                "which day on is it?",
            ),
            vague="I need a refill of one of my prescriptions.",
            known={"drug": drug},
            reads=(call("list_prescriptions", patient_id=person.id),),
            needs=references(prescription),
        )
        if world.today < first:
            yield _too_early(drug, first, goal)
            continue
        pickup = world.today + days(PICKUP_DAYS)
        arguments = {"prescription_id": prescription.id, "pickup_day": pickup.isoformat()}
        yield goal(
            outcome="write",
            writes=(call("refill_prescription", **arguments),),
            tells=(Fact.day(pickup, f"On which day can I pick up {drug}?"),),
            proposal=f"order a refill of {drug} for {said(pickup)}",
            reports=(
                f"The refill of {drug} has been ordered; you can pick it up on {said(pickup)}.",
                f"I have ordered {drug}, ready on {pickup.isoformat()}.",
            ),
        )


def _too_early(drug: str, first: dt.date, goal: GoalWriter) -> Goal:
    return goal(
        outcome="refuse",
        tells=(Fact.day(first, f"From which day on can I have {drug}?"),),
        reports=(
            f"I am sorry, I cannot refill {drug} yet; the first possible day is {said(first)}.",
            f"It is not possible to refill {drug} before {first.isoformat()}.",
        ),
    )


def _share(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    patient = world.tables[Patient][person.id]
    for appointment in _booked_of(world, person):
        doctor = world.tables[Doctor][appointment.doctor_id]
        share_cents = doctor.fee_cents * (PREMIUM_SHARE_PERCENT if patient.premium else SHARE_PERCENT) // 100
        yield Goal(
            kind="own_share",
            outcome="inform",
            asks=(
                f"How much will I have to pay myself for appointment {appointment.id}?",
                f"Tell me my own share of the fee of appointment {appointment.id}, please.",
            ),
            known={"appointment": appointment.id},
            reads=(
                call("get_appointment", appointment_id=appointment.id),
                call("list_doctors", specialty=doctor.specialty),
            ),
            tells=(Fact.amount(share_cents, "How much do I have to pay myself?"),),
            reports=(
                f"Your own share for {appointment.id} is {usd(share_cents)}.",
                f"For this appointment you pay {usd(share_cents)} yourself.",
            ),
            needs=references(appointment, doctor),
        )


def _change_phone(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    old = world.tables[Patient][person.id].phone
    for new in people.new_values(lambda: people.phone(rng), old):
        yield Goal(
            kind="change_phone",
            outcome="write",
            asks=(
                f"Please enter my new telephone number, {new}.",
                f"My telephone number has changed: it is {new} now, please note it.",
            ),
            vague="I have a new telephone number.",
            known={"phone": new},
            writes=(call("change_phone", patient_id=person.id, phone=new),),
            proposal=f"change your telephone number to {new}",
            reports=(f"Your number has been changed to {new}.", f"I have updated your telephone number to {new}."),
        )


def _cheapest_doctor(world: World, person: Person, rng: random.Random) -> Iterator[Goal]:
    names = tuple(doctor.name for doctor in world.rows(Doctor))
    for specialty in SPECIALTIES[:3]:
        doctors = sorted(world.rows(Doctor, specialty=specialty), key=lambda doctor: doctor.fee_cents)
        first, second = doctors[:2]
        if first.fee_cents == second.fee_cents:
            continue
        saved_cents = second.fee_cents - first.fee_cents
        yield Goal(
            kind="cheapest_doctor",
            outcome="inform",
            asks=(
                f"Which of your two doctors of {specialty} has the lower fee, and by how much is it lower?",
                f"I am looking for the cheaper doctor of {specialty}. Who is it, and what is the difference in fees?",
            ),
            known={"specialty": specialty},
            reads=(call("list_doctors", specialty=specialty),),
            tells=(
                Fact("name", first.name, f"Which doctor of {specialty} is it?", names),
                Fact.amount(saved_cents, "By how much is the fee lower?"),
            ),
            reports=(
                f"Doctor {first.name} has the lower fee, by {usd(saved_cents)}.",
                f"It is Doctor {first.name}; the difference is {usd(saved_cents)}.",
            ),
            needs=references(*doctors),
            needs_identity=False,
        )


DOMAIN = Domain(
    name="clinic",
    policy=POLICY,
    tools=TOOLS,
    make_world=make_world,
    goals={
        "book_appointment": _book,
        "move_appointment": _move,
        "cancel_appointment": _cancel,
        "refill": _refill,
        "own_share": _share,
        "change_phone": _change_phone,
        "cheapest_doctor": _cheapest_doctor,
    },
    changeable=("book_appointment", "move_appointment", "cancel_appointment", "refill", "change_phone"),
    alternatives={
        "patient_id": column(Patient),
        "slot_id": column(Slot),
        "appointment_id": column(Appointment),
        "prescription_id": column(Prescription),
        "phone": ("555-0000",),
    },
)
