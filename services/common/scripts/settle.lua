-- ARGV: now id computed billed; computed empty = release, nothing was used. Returns 1, or 0 when nothing is held.
local id, computed, billed = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
call('DEL', P .. 'where:' .. id)
local r = held(id)
if not r then return 0 end
free(id, r)
local input = math.min(computed or 0, r.input)
local unused = {tin = r.input - input, tout = r.output - ((computed or 0) - input)}
for _, scope in ipairs(scopes_of(r.key)) do
  if not computed then call('ZREM', P .. 'rpm' .. scope, id) end
  for name, tokens in pairs(unused) do
    if tokens ~= 0 and r.second >= second - WINDOW_S then
      add(P .. name .. scope, r.second, -tokens)
      call('PEXPIRE', P .. name .. scope, WINDOW_S * 2000)
    end
  end
  if billed > 0 then
    local b, nanos = book(scope), cost(r, billed)
    b.spent, b.day_tokens, b.month_tokens = b.spent + billed, b.day_tokens + billed, b.month_tokens + billed
    b.day_nanos, b.month_nanos = b.day_nanos + nanos, b.month_nanos + nanos
    write_book(scope, b)
  end
end
return 1
