-- End the round in work; users stay with stable. Looked at again: the menu may be older than the round.
local current = obj.status ~= nil and obj.status.currentRound or nil
local stable = obj.status ~= nil and obj.status.stable or nil
local ended = { Promoted = true, Blocked = true, Aborted = true, Superseded = true }
if current == nil or current.number == 0 or ended[current.step] then
  error("no round of this run is in work that could be given up; there is nothing to abort")
end
if stable ~= nil and stable.round == current.number then
  error("round " .. current.number .. " is stable already; there is nothing to abort")
end
obj.spec.requests = obj.spec.requests or {}
obj.spec.requests.abortRound = current.number
return obj
