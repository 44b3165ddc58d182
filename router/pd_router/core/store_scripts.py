"""What a shared store does in one step each, as Lua for Valkey and Redis: open a turn, put a handle, forget or end.

Separate from the client that sends them because here is decided what may never be torn apart. No two scripts run at
one time, and a script runs to its end, so each is as atomic as a call of the store in memory. All keys begin with one
prefix, which stands for one process of the server (`store_value.prefix`):

    <prefix>s        a hash: the highest turn number, the clock, and the era
    <prefix>k<mac>   number of the turn whose handle this key leads to
    <prefix>e<turn>  the handle: removing it is what spends it, whichever of its keys led there; one that is marked as
                     shared is not removed
    <prefix>l<mac>   an id's newest turn, so that a late finish does not pass for the newest
    <prefix>c<mac>   numbers of a conversation's last turns that left a handle, for its end

Every key has a time to live. The server's clock, in milliseconds, is the one that all routers share. When it is set
back, the era ends: what was written before looks younger than it is and is not used (HL-04). The same happens when
someone empties the store, since turn numbers begin anew. A server without memory left still gives and removes; only
numbers and new handles need some.
"""

from __future__ import annotations

from typing import Final

CLOCK_TOLERANCE_MS: Final = 1000
"""A clock may be set back by so little without ending the era: the router's TTL has ten times that to spare."""
STATE_SECONDS: Final = 86_400
HEAD_BYTES: Final = 2048
"""Of an entry, in which its lease is found; the first quarter has its keys."""
TURNS_REMEMBERED: Final = 32
"""Of one conversation. Earlier ones are superseded by then."""

_COMMON: Final = f"""
local prefix, turn_ttl = ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local state = redis.pcall('HMGET', prefix .. 's', 'turn', 'clock', 'era')
if state.err then
  redis.call('DEL', prefix .. 's')
  state = {{false, false, false}}
end
local turn, clock, era = tonumber(state[1]) or 0, tonumber(state[2]), tonumber(state[3])
local current = clock and era and now + {CLOCK_TOLERANCE_MS} >= clock

local function read(key)
  local value = redis.pcall('GET', key)
  if type(value) == 'string' then return value end
  if value then redis.call('DEL', key) end
  return nil
end

local function whole(number) return string.format('%.0f', number) end
"""

OPEN: Final = (
    _COMMON
    + """
local ttl, memory, limit, shared_ttl = turn_ttl, ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
if not current then era = math.max(now, (era or 0) + 1) end
local found, age, sent_age, value = 0, 0, 0, false
local expired, damaged = 0, 0
for index, key in ipairs(KEYS) do
  local holder = read(key)
  if holder then
    local name = prefix .. 'e' .. holder
    local size = redis.pcall('STRLEN', name)
    local entry = type(size) == 'number' and size <= limit and read(name)
    local stays = false
    if entry then
      local mark, written, arrived, sent = string.match(entry, '^([12])|(%d+)|(%d+)|(%d+)|')
      if not written then
        damaged = damaged + 1
      elseif written == whole(era) then
        age, sent_age = now - tonumber(arrived), now - tonumber(sent)
        stays = mark == '2'
        if age >= (stays and shared_ttl or ttl) then
          expired = expired + 1
          stays = false
        else
          found, value = index, entry
        end
      end
    elseif size ~= 0 then
      damaged = damaged + 1
    end
    if not stays then redis.call('DEL', key, name) end
    if found > 0 then break end
  end
end
turn = turn + 1
local done = redis.pcall('HSET', prefix .. 's', 'turn', whole(turn), 'clock', whole(now), 'era', whole(era))
if type(done) == 'table' and done.err then
  if not string.find(done.err, 'OOM', 1, true) then return done end
  turn = 0
else
  redis.call('EXPIRE', prefix .. 's', """
    + str(STATE_SECONDS)
    + """)
  for _, key in ipairs(KEYS) do
    local mac = string.sub(key, #prefix + 2)
    if string.sub(mac, 1, 1) ~= 'h' then
      redis.call('SET', prefix .. 'l' .. mac, whole(turn), 'PX', memory)
    end
  end
end
return {turn, whole(era), whole(now), found, math.max(age, 0), math.max(sent_age, 0), value, expired, damaged}
"""
)
"""Keys: where a handle may lie, in order. Arguments: prefix, TTL in ms, how long an id's newest turn is remembered in
ms, most bytes of an entry, TTL of a shared one in ms. Returns turn (0: no memory for it), era, clock, place of the key
that led there (0: none), ms since it arrived, ms since its turn was sent, the entry, how many were too old, how many
could not be read."""

PUT: Final = (
    _COMMON
    + """
local ttl, number, value = turn_ttl, tonumber(ARGV[3]), ARGV[6]
if not current or ARGV[4] ~= whole(era) then return {'late', 0, {}} end
local left = math.min(ttl, ttl - (now - tonumber(ARGV[5])))
if left < 1 then return {'expired', 0, {}} end
local free = {}
for _, key in ipairs(KEYS) do
  local mac = string.sub(key, #prefix + 2)
  local newest = tonumber(read(key)) or 0
  if string.sub(mac, 1, 1) ~= 'h' then newest = math.max(newest, tonumber(read(prefix .. 'l' .. mac)) or 0) end
  if newest <= number then free[#free + 1] = key end
end
if #free == 0 then return {'late', 0, {}} end
redis.call('SET', prefix .. 'e' .. whole(number), value, 'PX', whole(left))
local overwritten, heads = 0, {}
for _, key in ipairs(free) do
  local old = read(key)
  redis.call('SET', key, whole(number), 'PX', whole(left))
  if old and old ~= whole(number) then
    local name = prefix .. 'e' .. old
    local head = redis.pcall('GETRANGE', name, 0, """
    + str(HEAD_BYTES - 1)
    + """)
    local others = type(head) == 'string' and string.match(head, '^[12]|%d+|%d+|%d+|([^\\n]*)\\n') or ''
    local reachable = false
    for mac in string.gmatch(others, '[^,]+') do
      if read(prefix .. 'k' .. mac) == old then reachable = true end
    end
    if not reachable and redis.call('DEL', name) == 1 then
      overwritten = overwritten + 1
      if type(head) == 'string' then heads[#heads + 1] = head end
    end
  end
end
for index = 7, #ARGV do
  local name = prefix .. 'c' .. ARGV[index]
  local turns = {}
  for one in string.gmatch(read(name) or '', '%d+') do turns[#turns + 1] = one end
  turns[#turns + 1] = whole(number)
  local from = math.max(1, #turns - """
    + str(TURNS_REMEMBERED - 1)
    + """)
  redis.call('SET', name, table.concat(turns, ',', from), 'PX', whole(left))
end
return {#free == #KEYS and 'stored' or 'partly_late', overwritten, heads}
"""
)
"""Keys: where the next turn will look. Arguments: prefix, TTL of such an entry in ms, turn, era, arrival in ms of the
server's clock, entry, what stands for its conversation. Returns a `PutResult`, how many older handles nothing leads to
any more, and their beginnings."""

FORGET: Final = """
local prefix, gone = ARGV[1], 0
for _, key in ipairs(KEYS) do
  local holder = redis.pcall('GET', key)
  local name = type(holder) == 'string' and prefix .. 'e' .. holder
  if not name then
    redis.call('DEL', key)
  elseif redis.pcall('GETRANGE', name, 0, 1) ~= '2|' then
    redis.call('DEL', key)
    gone = gone + redis.call('DEL', name)
  end
end
return gone
"""
"""Keys: of a conversation. Argument: prefix. Returns how many handles went."""

END: Final = (
    """
local prefix, heads = ARGV[1], {}
local function drop(number)
  local name = prefix .. 'e' .. number
  local head = redis.pcall('GETRANGE', name, 0, """
    + str(HEAD_BYTES - 1)
    + """)
  if redis.call('DEL', name) == 1 and type(head) == 'string' then heads[#heads + 1] = head end
end
for _, key in ipairs(KEYS) do
  local holder = redis.pcall('GET', key)
  redis.call('DEL', key)
  if type(holder) == 'string' then drop(holder) end
end
for index = 2, #ARGV do
  local name = prefix .. 'c' .. ARGV[index]
  local turns = redis.pcall('GET', name)
  redis.call('DEL', name)
  if type(turns) == 'string' then
    for number in string.gmatch(turns, '%d+') do drop(number) end
  end
end
return heads
"""
)
"""Keys: that lead to the conversation's handles. Arguments: prefix, what stands for the conversation. Returns the
beginnings of the handles that went."""
