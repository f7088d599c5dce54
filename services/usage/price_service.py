"""The gRPC face of prices and plans. Translates; decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc

from services.common.errors import InvalidRequest
from services.usage.account_service import CallContext, authorization_of
from services.usage.account_wire import stamp, time_field
from services.usage.admin_keys import AdminKeys
from services.usage.prices import Price
from services.usage.rating import Rater

MAX_PRICES = 100


class PriceService(usage_service_pb2_grpc.PriceServiceServicer):
    """Administrators set what tokens cost."""

    def __init__(self, rater: Rater, admins: AdminKeys, on_change: Callable[[], None]) -> None:
        """`on_change` is called after prices or plans were set."""
        self._rater = rater
        self._admins = admins
        self._on_change = on_change

    async def SetPrices(self, request: pb.SetPricesRequest, context: CallContext) -> pb.SetPricesResponse:
        """All or none. Raises InvalidRequest."""
        await self._admins.administrator(authorization_of(context))
        if not 1 <= len(request.prices) <= MAX_PRICES:
            raise InvalidRequest(f"Set 1 to {MAX_PRICES} prices at a time.", param="prices")
        added = await self._rater.set_prices([_parse(price) for price in request.prices])
        self._on_change()
        return pb.SetPricesResponse(prices=[_price(price) for price in added])

    async def ListPrices(self, request: pb.ListPricesRequest, context: CallContext) -> pb.ListPricesResponse:
        """Every price ever set."""
        await self._admins.administrator(authorization_of(context))
        return pb.ListPricesResponse(prices=[_price(price) for price in await self._rater.list_prices()])

    async def SetPlan(self, request: pb.SetPlanRequest, context: CallContext) -> pb.SetPlanResponse:
        """Raises InvalidRequest."""
        await self._admins.administrator(authorization_of(context))
        await self._rater.set_plan(request.tenant, request.plan, _start(request))
        self._on_change()
        return pb.SetPlanResponse()

    async def RateAgain(self, request: pb.RateAgainRequest, context: CallContext) -> pb.RateAgainResponse:
        """Takes as long as the rows are many; rows that are billed right already stay as they are."""
        await self._admins.administrator(authorization_of(context))
        changed = await self._rater.rate_again(time_field(request, "start_time"), time_field(request, "end_time"))
        return pb.RateAgainResponse(changed_row_count=changed)


def _start(request: pb.Price | pb.SetPlanRequest) -> datetime:
    start = time_field(request, "start_time")
    if start is None:
        raise InvalidRequest("start_time is missing.", param="start_time")
    return start.astimezone(UTC)


def _parse(price: pb.Price) -> Price:
    return Price(
        0,
        price.plan,
        price.model,
        price.version,
        price.priority_class,
        price.token_kind,
        price.currency,
        price.micros_per_million,
        _start(price),
        time_field(price, "end_time"),
    )


def _price(price: Price) -> pb.Price:
    return pb.Price(
        price_id=price.price_id,
        plan=price.plan,
        model=price.model,
        version=price.version,
        priority_class=price.priority_class,
        token_kind=price.token_kind,
        currency=price.currency,
        micros_per_million=price.micros_per_million,
        start_time=stamp(price.start),
        end_time=stamp(price.end),
    )
