-- ARGV: now id key prompt leased more price_in price_out, limits of the tenant, limits of the key (empty = none).
-- Returns the tokens granted of `more`. A reservation that was lost comes back first, as far as the budget allows, so
-- that a stalled stream goes on. Called twice, it holds more, never less; settle frees all of it.
local id, key, leased, more = ARGV[2], ARGV[3], tonumber(ARGV[5]), tonumber(ARGV[6])
free_expired()
local r = held(id)
local lost = r == nil
r = r or {
  second = 0, input = tonumber(ARGV[4]), output = 0, budget = 0, price_in = tonumber(ARGV[7]),
  price_out = tonumber(ARGV[8]), key = key,
}
local most = (lost and leased or r.budget) + more
local scopes = scopes_of(r.key)
for n, l in ipairs(limits_at(9, scopes)) do
  local b = book(scopes[n])
  for _, rule in ipairs(BUDGETS) do
    if l[rule[1]] then
      local room = l[rule[1]] - b[rule[2]] - b[rule[3]]
      most = math.min(most, rule[3] == 'nanos' and affordable(r, cost(r, r.budget) + room) or r.budget + room)
    end
  end
end
local before = lost and leased or r.budget
most = math.max(most, r.budget)
if lost and most == 0 then return 0 end
hold(id, r, most)
return math.max(0, most - before)
