-- ARGV: now lease_ms claim_id... Renews the claims that are still held; lease_ms 0 gives them back at once.
local lease_ms = tonumber(ARGV[2])
local args = {}
for i = 3, #ARGV do
  args[#args + 1] = lease_ms > 0 and now + lease_ms or 0
  args[#args + 1] = ARGV[i]
end
local changed = call('ZADD', LEASE, 'XX', 'CH', unpack(args))
if lease_ms == 0 and changed > 0 then ring() end
return changed
