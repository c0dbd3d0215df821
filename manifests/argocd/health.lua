-- Health of a ProdRLRun for Argo CD. The first rule that applies decides; a loop whose rounds turn is Healthy.
local function health(status, message)
  return { status = status, message = message }
end

local conditions = {}
if obj.status ~= nil and obj.status.conditions ~= nil then
  for _, condition in ipairs(obj.status.conditions) do
    conditions[condition.type] = condition
  end
end

local function says(kind, status)
  return conditions[kind] ~= nil and conditions[kind].status == status
end

local function text(kind, otherwise)
  local condition = conditions[kind]
  if condition == nil then
    return otherwise
  end
  if condition.message == nil or condition.message == "" then
    return condition.reason or otherwise
  end
  return condition.message
end

if obj.metadata.deletionTimestamp ~= nil then
  return health("Progressing", "the run is being deleted")
end
if obj.status == nil or obj.status.observedGeneration == nil then
  return health("Progressing", "the operator has not seen the run yet")
end
if obj.status.observedGeneration ~= obj.metadata.generation then
  return health("Progressing", "the operator has not seen the new spec yet")
end
if says("Reconciling", "True") then
  return health("Progressing", text("Reconciling", "the new spec takes effect"))
end
if says("Stalled", "True") then
  return health("Degraded", text("Stalled", "a person must act"))
end
if obj.spec ~= nil and obj.spec.suspend == true then
  return health("Suspended", "spec.suspend is true; users stay served")
end
if says("Ready", "True") then
  local doing = text("Ready", "users are served")
  if says("Progressing", "True") then
    doing = text("Progressing", doing)
  end
  return health("Healthy", doing)
end
return health("Progressing", text("Ready", "users are not served yet"))
