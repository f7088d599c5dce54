-- ARGV: now, then id tenant epoch state computed billed reason event for each. Returns {won, state, tenant, computed,
-- billed} for each: the winner's values.
local out = {}
for i = 2, #ARGV, 8 do
  local t = {id = ARGV[i], tenant = ARGV[i + 1], epoch = tonumber(ARGV[i + 2]), state = tonumber(ARGV[i + 3]),
    computed = tonumber(ARGV[i + 4]), billed = tonumber(ARGV[i + 5]), reason = ARGV[i + 6], event = ARGV[i + 7]}
  out[#out + 1] = finish(read(t.id), t)
end
return out
