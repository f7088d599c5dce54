-- ARGV: now router count lease_ms aging_ms workers. Returns a list of {claim id, claim number, remaining ms, ms since
-- admission, entry}.
local router, most, lease_ms, aging_ms = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local workers = tonumber(ARGV[6])
local MAX_EXPIRED = 16
-- Tenants at their caps that a call looks past.
local MAX_CAPPED = 256
local WEIGHTS = {interactive = 8, batch = 1}
local out, expired = {}, 0

local function take(r, class, tenant, entry, body)
  local number = call('HINCRBY', req(r.id), 'claims', 1)
  local member = class .. '|' .. tenant .. '|' .. entry .. '|' .. number
  count(r)
  call('ZADD', LEASE, now + lease_ms, member)
  call('HSET', req(r.id), 'state', 'claimed', 'claim', member, 'router', router)
  out[#out + 1] = {member, number, tonumber(r.deadline) - now, now - tonumber(r.since), body}
end

for _, member in ipairs(call('ZRANGEBYSCORE', LEASE, '-inf', now, 'LIMIT', 0, most)) do
  local class, tenant, entry = string.match(member, '^(.-)|(.+)|([%d%-]+)|%d+$')
  local found = call('XRANGE', work(class, tenant), entry, entry)[1]
  local r = found and read(found[2][4])
  if not r or r.claim ~= member then
    call('ZREM', LEASE, member)
    if not r then drop(class, tenant, entry) end
  elseif tonumber(r.deadline) > now then
    call('ZREM', LEASE, member)
    take(r, class, tenant, entry, found[2][2])
  elseif expired < MAX_EXPIRED then
    expired = expired + 1
    expire(r)
  end
end

-- The tenant of the class with the least virtual time that is not at its caps: it comes after `passed` that are.
local passed = {interactive = 0, batch = 0}
local function pick_tenant(class)
  local act = P .. 'act:' .. class
  while passed[class] < MAX_CAPPED do
    local first = call('ZRANGE', act, passed[class], passed[class], 'WITHSCORES')
    if not first[1] then return nil end
    if not is_capped(first[1], workers) then return first[1], tonumber(first[2]) end
    passed[class] = passed[class] + 1
  end
end

-- The class with the least virtual time; a class whose oldest entry ages rises to the weight of the highest.
local done = {}
local function pick_class()
  local best, best_vt, best_weight
  for _, class in ipairs({'interactive', 'batch'}) do
    local oldest = call('ZRANGE', P .. 'age:' .. class, 0, 0, 'WITHSCORES')
    if oldest[2] and not done[class] then
      local weight = WEIGHTS[class]
      weight = weight + (8 - weight) * math.min(1, math.max(0, now - tonumber(oldest[2])) / aging_ms)
      local vt = tonumber(call('HGET', Q, 'class|' .. class) or '0')
      if not best or vt < best_vt then best, best_vt, best_weight = class, vt, weight end
    end
  end
  return best, best_vt, best_weight
end

local function serve(class, class_vt, class_weight, tenant, vt)
  local reply = call('XREADGROUP', 'GROUP', 'g', 'router', 'COUNT', 1, 'STREAMS', work(class, tenant), '>')
  local found = reply[1][2][1]
  local entry, r = found[1], read(found[2][4])
  if not r then
    drop(class, tenant, entry)
    unfresh(class, tenant, entry)
  elseif tonumber(r.deadline) <= now then
    expired = expired + 1
    expire(r)
  else
    local cost = expected(class, tonumber(r.cost))
    call('HSET', Q, 'last|' .. class, vt, 'last_class', class_vt, 'class|' .. class, class_vt + cost / class_weight)
    call('HSET', req(r.id), 'charged', cost)
    call('ZINCRBY', P .. 'act:' .. class, cost / tonumber(r.weight), tenant)
    unfresh(class, tenant, entry)
    take(r, class, tenant, entry, found[2][2])
  end
end

while #out < most and expired < MAX_EXPIRED do
  local class, class_vt, class_weight = pick_class()
  if not class then break end
  local tenant, vt = pick_tenant(class)
  if tenant then
    serve(class, class_vt, class_weight, tenant, vt)
  else
    done[class] = true
  end
end
return out
