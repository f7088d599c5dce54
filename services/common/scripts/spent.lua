-- ARGV: now key, then twice (total day day_tokens day_nanos month month_tokens month_nanos): what the ledger says that the
-- scope has spent, and what it said so long ago that all of that has been settled here. The first counts where nothing is
-- known, else the second, which only raises: a row may be in the ledger before its reservation is settled, never twice.
local key = ARGV[2]
local scope = key == '' and '' or '|' .. key
local b = book(scope)
local first = b.known == 0 and 3 or 10
local function raise(name, i) b[name] = math.max(b[name], tonumber(ARGV[first + i])) end
raise('spent', 0)
if tonumber(ARGV[first + 1]) == b.day then
  raise('day_tokens', 2)
  raise('day_nanos', 3)
end
if tonumber(ARGV[first + 4]) == b.month then
  raise('month_tokens', 5)
  raise('month_nanos', 6)
end
b.known = 1
write_book(scope, b)
return 1
