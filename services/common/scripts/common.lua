-- Prelude of every script: time (ARGV[1] in ms, or Redis TIME when it is empty) and the slot's key prefix.
local call = redis.call
local now = tonumber(ARGV[1])
if not now then
  local t = call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local P = string.match(KEYS[1], '^(mr:{[^}]*}:)')

local function add(key, field, delta)
  if call('HINCRBY', key, field, delta) <= 0 then call('HDEL', key, field) end
end
