"""The labels in the result of a PromQL expression, from the table of series. Unknown series and labels are errors.

PromQL itself accepts a label that a series does not have, and silently returns nothing.
"""

from __future__ import annotations

import re

import promql_parser as promql

from peer.telemetry.series import OF_BOOTSTRAP, OF_PEER, PREFIX, Series

Labels = frozenset[str]
SCRAPED = frozenset({"job", "instance"})
OF_TARGET = SCRAPED | {"run", "peer", "peer_id"}  # /targets adds them to a peer's series
MATCHES_ALL = ".*"


class Unknown(Exception):
    """A series, label or value that does not exist."""


class Known:
    """All exported series. :meth:`add` adds a recorded one."""

    def __init__(self) -> None:
        self._labels: dict[str, Labels] = {
            "up": OF_TARGET,
            "ALERTS": OF_TARGET | {"alertname", "alertstate", "severity"},
        }
        self._values: dict[tuple[str, str], tuple[str, ...]] = {}
        for rows, target in ((OF_PEER, OF_TARGET), (OF_BOOTSTRAP, SCRAPED)):
            for row in rows:
                self._add_row(row, frozenset(row.labels) | target)

    def _add_row(self, row: Series, labels: Labels) -> None:
        names = [PREFIX + row.name]
        if row.kind == "histogram":
            self._labels[f"{names[0]}_bucket"] = labels | {"le"}
            names = [f"{names[0]}_sum", f"{names[0]}_count"]
        for name in names:
            self._labels[name] = labels
            if row.values:
                self._values[name, row.labels[-1]] = row.values

    def add(self, name: str, expr: str) -> Labels:
        """Add the series of a recording rule; its labels."""
        self._labels[name] = self.labels_of(expr)
        return self._labels[name]

    def labels_of(self, expr: str) -> Labels:
        """The labels of the result. Raises :class:`Unknown`."""
        return self._of(promql.parse(expr)) or frozenset()

    def _of(self, node: promql.Expr) -> Labels | None:
        """The labels of a vector; ``None`` for a number."""
        match node:
            case promql.NumberLiteral():
                return None
            case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
                return self._of(node.expr)
            case promql.MatrixSelector():
                return self._selector(node.vector_selector)
            case promql.VectorSelector():
                return self._selector(node)
            case promql.Call():
                return self._call(node)
            case promql.AggregateExpr():
                return self._aggregate(node)
            case promql.BinaryExpr():
                return self._binary(node)
        raise Unknown(f"{type(node).__name__} in {node}")

    def _selector(self, node: promql.VectorSelector) -> Labels:
        if node.name not in self._labels:
            raise Unknown(f"series {node.name}")
        labels = self._labels[node.name]
        for matcher in node.matchers.matchers:
            if matcher.name not in labels:
                raise Unknown(f"label {matcher.name} of {node.name}")
            values = self._values.get((node.name, matcher.name))
            exact = matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual)
            for word in [matcher.value] if exact else matcher.value.split("|"):
                if values and word != MATCHES_ALL and word not in values:
                    raise Unknown(f"{matcher.name}={word} of {node.name}; there are {', '.join(values)}")
        return labels

    def _call(self, node: promql.Call) -> Labels | None:
        name = node.func.name
        if name == "vector":
            return frozenset()
        vectors = [labels for labels in map(self._of, node.args) if labels is not None]
        if not vectors:
            return None  # time()
        return vectors[0] - {"le"} if name == "histogram_quantile" else vectors[0]

    def _aggregate(self, node: promql.AggregateExpr) -> Labels:
        inner = self._of(node.expr) or frozenset()
        if node.modifier is None:
            return frozenset()
        named = frozenset(node.modifier.labels)
        if missing := named - inner:
            raise Unknown(f"label {', '.join(sorted(missing))} in {node}")
        return named if node.modifier.type == promql.AggModifierType.By else inner - named

    def _binary(self, node: promql.BinaryExpr) -> Labels | None:
        left, right = self._of(node.lhs), self._of(node.rhs)
        if left is None or right is None:
            return right if left is None else left
        op, modifier = str(node.op), node.modifier
        matching = modifier.matching if modifier else None
        named = frozenset(matching.labels) if matching else frozenset()
        if missing := named - (left & right):
            raise Unknown(f"label {', '.join(sorted(missing))} is not on both sides of {op} in {node}")
        if op == "or":
            return left & right
        if op in ("and", "unless") or modifier is None or modifier.card != promql.VectorMatchCardinality.OneToOne:
            return left
        include = matching is not None and matching.type == promql.LabelModifierType.Include
        return named if include else left - named


def words_in(template: str) -> set[str]:
    """The labels in a legend or an annotation."""
    return set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)", template))
