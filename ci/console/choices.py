"""A choice among words that asks which one was meant."""

from __future__ import annotations

from typing import Any

import click

from ...fixtures.suggestions import did_you_mean


class Choice(click.Choice):  # type: ignore[type-arg]  # generic from click 8.2 on only
    """One of a few words; any other word is refused, with the one that it resembles."""

    def convert(
        self,
        value: Any,  # noqa: ANN401  click's
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:  # noqa: ANN401  click's
        """Return the word that was chosen."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            meant = did_you_mean(str(value), self.choices)
            message = f"{error.message.rstrip('.')}; {meant}".rstrip("; ")
            raise click.BadParameter(message, ctx, param) from error
