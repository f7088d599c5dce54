-- ARGV: now id class tenant cost weight deadline remaining gateway attempt readmit event entry, caps: requests tokens
-- bytes tenant_requests predicted_wait_ms worker_slots worker_tokens (empty = none), the workers that died with the request
-- in hand, oldest first, its slots, and what it asks for (a digest).
-- Returns {entry id, position}, or {'', reason, retry_after_ms}.
local id, class, tenant, cost, weight = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local attempt, readmit, body = tonumber(ARGV[10]), ARGV[11] == '1', ARGV[13]
local r = read(id)
if r then
  if readmit and r.state == 'finished' then return {'', 'SUPERSEDED', 0} end
  if not readmit or attempt <= tonumber(r.attempt) then
    local first = call('HMGET', req(id), 'admitted', 'position')
    return {first[1] or '0-0', tonumber(first[2] or '0')}
  end
end

-- The request that two dead workers had in common is what they died of. Where they had several, each of those runs apart
-- from the others, and a third death names the one.
local dead = {}
for worker in string.gmatch(ARGV[21], '%S+') do dead[#dead + 1] = worker end

local function one_of_several()
  for _, other in ipairs(call('SMEMBERS', P .. 'lost:' .. dead[1])) do
    local owner, lost, terminal = unpack(call('HMGET', req(other), 'owner', 'lost', 'terminal'))
    local had = owner == dead[2] or string.find(' ' .. (lost or '') .. ' ', ' ' .. dead[2] .. ' ', 1, true)
    if other ~= id and had and terminal ~= '1' then return true end
  end
end

if #dead > 0 then
  if #dead > 2 or (#dead == 2 and not one_of_several()) then
    if r then call('HSET', req(id), 'lost', ARGV[21]) end
    return {'', 'POISONED', 0}
  end
  call('SADD', P .. 'lost:' .. dead[#dead], id)
  call('PEXPIRE', P .. 'lost:' .. dead[#dead], FINISHED_TTL_MS)
end

local counts = call('HMGET', Q, 'n', 'bytes', 'tok|interactive', 'tok|batch')
for i = 1, 4 do counts[i] = tonumber(counts[i] or '0') end
local act = P .. 'act:' .. class
if not readmit then
  local ask = ARGV[23]
  local held, held_tokens = 0, 0
  if not take_place(ask) then held, held_tokens = held_room() end
  local function over(have, room, most) return have + math.min(room, tonumber(most) / 2) > tonumber(most) end

  local rate = drain_rate()
  local tenants = call('ZCARD', act) + (call('ZSCORE', act, tenant) and 0 or 1)
  local function refuse(reason, least)
    local wait = rate and rate > 0 and give_place(ask, tenant, cost, cost / rate * tenants, least) or 1000
    return {'', reason, math.floor(wait)}
  end

  local promised = call('ZSCORE', PLACED, tenant)
  local share = tonumber(call('HGET', T, 'n|' .. tenant) or '0') + 1
  if over(share, promised and held or 0, ARGV[17]) then return refuse('QUEUE_SHARE', 0) end
  if over(counts[1] + 1, held, ARGV[14]) or over(counts[3] + counts[4] + cost, held_tokens, ARGV[15])
    or counts[2] + #body > tonumber(ARGV[16]) then return refuse('QUEUE_FULL', 0) end
  if rate and counts[1] > 0 then
    -- What is ahead: the class (interactive has 8/9 of the drain), but no more than this tenant's share of it.
    local ahead = class == 'interactive' and counts[3] * 9 / 8 or counts[3] + counts[4]
    local own = tonumber(call('HGET', T, 'tok|' .. class .. '|' .. tenant) or '0')
    local per_ms = math.max(rate, 1e-9)
    local wait = math.min(ahead, (own + cost) * tenants) / per_ms
    if over(wait, promised and held_tokens / per_ms or 0, ARGV[18]) then
      return refuse('QUEUE_FULL', wait - tonumber(ARGV[18]))
    end
  end
end

local claims = 0
if r then
  leave(r)
  uncount(r)
  claims = tonumber(r.claims)
end
-- Epochs of a later attempt are above all earlier ones, even where Redis lost the request.
claims = math.max(claims, (attempt - 1) * 65536)
local entry = call('HINCRBY', Q, 'seq', 1) .. '-1'
local behind = call('ZCARD', P .. 'age:interactive')
local all = behind + call('ZCARD', P .. 'age:batch')
if class == 'batch' then behind = all end
-- A tenant that comes may be claimed though others wait: for room, or under their own caps, which may be new.
if all == 0 or readmit or not call('ZSCORE', act, tenant) or call('HEXISTS', T, 'caps|' .. tenant) == 1 then ring() end
if counts[1] == 0 then call('HSET', Q, 'busy_since', now) end
call('HINCRBY', Q, 'n', 1)
call('HINCRBY', Q, 'bytes', #body)
call('HINCRBY', Q, 'tok|' .. class, cost)
call('HINCRBY', T, 'n|' .. tenant, 1)
call('HINCRBY', T, 'tok|' .. class .. '|' .. tenant, cost)

local stream = class
if readmit then
  stream, behind = 'front', 0
  local member = 'front|' .. tenant .. '|' .. entry .. '|0'
  call('ZADD', LEASE, 0, member)
  call('HSET', req(id), 'claim', member)
else
  if call('EXISTS', work(class, tenant)) == 0 then
    call('XGROUP', 'CREATE', work(class, tenant), 'g', '0', 'MKSTREAM')
  end
  call('ZADD', P .. 'age:' .. class, now, tenant .. '|' .. entry)
  call('HINCRBY', T, 'f|' .. class .. '|' .. tenant, 1)
  cap(tenant, ARGV[19], ARGV[20])
  if not call('ZSCORE', act, tenant) then
    local v = call('HMGET', Q, 'class|' .. class, 'last_class', 'last|' .. class)
    if call('ZCARD', act) == 0 then
      call('HSET', Q, 'class|' .. class, math.max(tonumber(v[1] or '0'), tonumber(v[2] or '0')))
    end
    local own = tonumber(call('HGET', P .. 'vt:' .. class, tenant) or '0')
    call('ZADD', act, math.max(own, tonumber(v[3] or '0')), tenant)
    call('HDEL', P .. 'vt:' .. class, tenant)
  end
end
call('XADD', work(stream, tenant), entry, 'e', body, 'r', id)
local deadline = ARGV[8] ~= '' and now + tonumber(ARGV[8]) or tonumber(ARGV[7])
if deadline == 0 then deadline = now + 3600000 end
call('HSET', req(id), 'state', 'queued', 'stream', stream, 'entry', entry, 'cls', class, 'tenant', tenant,
  'cost', cost, 'size', #body, 'weight', weight, 'charged', r and r.charged or 0, 'claims', claims,
  'epoch', attempt > 1 and claims * 256 or 0, 'deadline', deadline, 'since', now, 'gw', ARGV[9], 'attempt', attempt,
  'event', ARGV[12], 'owner', '', 'lost', ARGV[21], 'slots', ARGV[22], 'admitted', entry, 'position', behind)
call('HSET', LIVE, id, ARGV[9])
return {entry, behind}
