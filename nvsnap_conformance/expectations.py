"""Expected failures: matched by signature, owned, dated, and void as soon as they are wrong."""

from __future__ import annotations

import datetime
from itertools import combinations
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import Field, field_validator

from nvsnap_conformance.clauses.registry import ClauseId, Registry
from nvsnap_conformance.errors import ExpectationError
from nvsnap_conformance.outcomes import Signature
from nvsnap_conformance.suggest import did_you_mean
from nvsnap_conformance.tomlfile import StrictModel, WorldSize

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

_SEPARATE = "keep one, or give them engine, driver or tensor_parallel keys that exclude each other"
_RENEW = "look whether the defect is still there, then remove the entry or renew 'expires'"


class Expectation(StrictModel):
    """One failure that a target is known to have.

    ``engine`` is a PEP 508 requirement without extras (``vllm>=0.27,<0.34``), ``driver`` a PEP 440
    specifier, ``tensor_parallel`` the world sizes to which the entry applies; each absent key means all.
    The entry is good up to and including the day ``expires``.
    """

    clause: ClauseId
    signature: str
    reason: str = Field(min_length=1)
    url: str = Field(pattern=r"^https://")
    owner: str = Field(min_length=1)
    expires: datetime.date
    engine: str | None = None
    driver: str | None = None
    tensor_parallel: tuple[WorldSize, ...] | None = Field(default=None, min_length=1)

    @field_validator("signature")
    @classmethod
    def _readable_signature(cls, value: str) -> str:
        Signature.parse(value)
        return value

    @field_validator("engine")
    @classmethod
    def _readable_engine(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                requirement = Requirement(value)
            except InvalidRequirement as error:
                raise ValueError(f"{value!r} is no requirement such as 'vllm>=0.27,<0.34': {error}") from None
            if requirement.url or requirement.extras or requirement.marker:
                raise ValueError(f"{value!r}: a name and a version specifier only")
        return value

    @field_validator("driver")
    @classmethod
    def _readable_driver(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                bounds = SpecifierSet(value)
            except InvalidSpecifier as error:
                raise ValueError(f"{value!r} is no version specifier such as '>=580': {error}") from None
            if not bounds:  # it would hold for every driver, and where there is none
                raise ValueError("it names no version: give one such as '>=580', or leave the key out")
        return value

    def applies(
        self,
        *,
        engine: str,
        engine_version: str | None,
        tensor_parallel: int,
        driver_version: str | None = None,
    ) -> bool:
        """Whether the entry speaks of this engine, driver and world size at all."""
        if self.engine is not None:
            wanted = Requirement(self.engine)
            if wanted.name != engine or not _contains(wanted.specifier, engine_version):
                return False
        if self.driver is not None and not _contains(SpecifierSet(self.driver), driver_version):
            return False
        return self.tensor_parallel is None or tensor_parallel in self.tensor_parallel

    def expired(self, today: datetime.date) -> bool:
        """Whether the entry's last day has passed."""
        return today > self.expires

    def __str__(self) -> str:
        return f"{self.clause} {self.signature}"


class Expectations:
    """The expectations of one target; ``source`` is the file that they were read from."""

    def __init__(self, entries: Sequence[Expectation], *, source: Path) -> None:
        self.entries = tuple(entries)
        self.source = source

    def validate(self, registry: Registry, *, today: datetime.date | None = None) -> None:
        """Raise :class:`ExpectationError` for an unknown clause, overlapping entries, or an expired entry.

        Expiry is checked only where ``today`` is given.
        """
        for entry in self.entries:
            if entry.clause not in registry.clauses:
                raise ExpectationError(
                    f"{self.source}: an [[expect]] entry names the unknown clause {entry.clause!r}",
                    next_step=did_you_mean(entry.clause, registry.clauses),
                )
        for one, other in combinations(self.entries, 2):
            if _overlap(one, other):
                raise ExpectationError(
                    f"{self.source}: two [[expect]] entries can match the same failure: {one} and {other}",
                    next_step=_SEPARATE,
                )
        for entry in self.entries:
            if today is not None and entry.expired(today):
                raise ExpectationError(
                    f"{self.source}: the [[expect]] entry {entry} has expired on {entry.expires}",
                    cause=f"nobody has renewed it; its owner is {entry.owner} ({entry.url})",
                    next_step=_RENEW,
                )

    def applicable(
        self,
        clause: str,
        *,
        engine: str,
        engine_version: str | None,
        tensor_parallel: int,
        driver_version: str | None = None,
    ) -> tuple[Expectation, ...]:
        """Return the entries for ``clause`` that apply here, whatever their signature."""
        return tuple(
            entry
            for entry in self.entries
            if entry.clause == clause
            and entry.applies(
                engine=engine,
                engine_version=engine_version,
                tensor_parallel=tensor_parallel,
                driver_version=driver_version,
            )
        )

    def match(
        self,
        clause: str,
        signature: Signature | str,
        *,
        engine: str,
        engine_version: str | None,
        tensor_parallel: int,
        driver_version: str | None = None,
        today: datetime.date | None = None,
    ) -> Expectation | None:
        """Return the entry that expects ``signature`` of ``clause``, ``None`` where there is none.

        Raises :class:`ExpectationError` where two match or the one that does has expired (``today``
        defaults to the date in UTC): such a failure is ``BAD_EXPECTATION``, not expected.
        """
        observed = Signature.parse(signature) if isinstance(signature, str) else signature
        found = [
            entry
            for entry in self.applicable(
                clause,
                engine=engine,
                engine_version=engine_version,
                tensor_parallel=tensor_parallel,
                driver_version=driver_version,
            )
            if Signature.parse(entry.signature).matches(observed)
        ]
        if len(found) > 1:
            raise ExpectationError(
                f"{self.source}: {len(found)} [[expect]] entries match {clause} {observed}",
                next_step=_SEPARATE,
            )
        if found and found[0].expired(today or datetime.datetime.now(datetime.UTC).date()):
            raise ExpectationError(
                f"{self.source}: the [[expect]] entry {found[0]} has expired on {found[0].expires}",
                next_step=_RENEW,
            )
        return found[0] if found else None

    def unmet(
        self,
        clause: str,
        met: Collection[str],
        *,
        engine: str,
        engine_version: str | None,
        tensor_parallel: int,
        driver_version: str | None = None,
    ) -> tuple[Expectation, ...]:
        """Return the entries for ``clause`` that apply here and are not among ``met``.

        ``met`` holds entries as text: of those that apply at one place no two have the same.
        """
        return tuple(
            entry
            for entry in self.applicable(
                clause,
                engine=engine,
                engine_version=engine_version,
                tensor_parallel=tensor_parallel,
                driver_version=driver_version,
            )
            if str(entry) not in met
        )


def _contains(specifier: SpecifierSet, version: str | None) -> bool:
    if not specifier:
        return True
    try:
        return version is not None and specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _overlap(one: Expectation, other: Expectation) -> bool:
    """Whether some failure could match both entries."""
    if one.clause != other.clause:
        return False
    first, second = Signature.parse(one.signature), Signature.parse(other.signature)
    if not (first.matches(second) or second.matches(first)):
        return False
    if (
        one.tensor_parallel
        and other.tensor_parallel
        and not set(one.tensor_parallel) & set(other.tensor_parallel)
    ):
        return False
    if one.engine and other.engine:
        left, right = Requirement(one.engine), Requirement(other.engine)
        if left.name != right.name or not _intersect(left.specifier, right.specifier):
            return False
    return not (one.driver and other.driver) or _intersect(
        SpecifierSet(one.driver), SpecifierSet(other.driver)
    )


def _intersect(left: SpecifierSet, right: SpecifierSet) -> bool:
    """Whether some version satisfies both: the versions that they name and their neighbours are tried."""
    both = [*left, *right]
    if not both:
        return True
    candidates: set[Version] = set()
    for specifier in both:
        candidates.update(_neighbours(specifier.version.removesuffix(".*")))
    return any(left.contains(v, prereleases=True) and right.contains(v, prereleases=True) for v in candidates)


def _neighbours(text: str) -> Iterable[Version]:
    version = Version(text)
    yield version
    yield Version(f"{version.base_version}.1")
    yield Version(f"{version.base_version}.dev0")
    # Just below: 0.34 bounds 0.33.x, which a specifier '<0.34' alone would otherwise not be tried with.
    release = list(version.release)
    for index in range(len(release)):
        if release[index] > 0:
            lower = [*release[:index], release[index] - 1, *[999] * (len(release) - index)]
            yield Version(".".join(map(str, lower)))
