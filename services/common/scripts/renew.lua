-- ARGV: now id... Extends the reservations that are still there.
local args = {}
for i = 2, #ARGV do
  args[#args + 1] = now + HOLD_MS
  args[#args + 1] = ARGV[i]
end
return call('ZADD', LIVE, 'XX', 'CH', unpack(args))
