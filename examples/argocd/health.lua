-- Argo CD's health check for JobRequests. In the ConfigMap argocd-cm, this file is the value of
--   resource.customizations.health.jobrequest.dev_JobRequest
-- or, in the Argo CD chart's values, of configs.cm with that key.
--
-- Healthy: it succeeded. Degraded: it failed for good, was cancelled or was rejected. Suspended: spec.suspend holds it.
-- Progressing: everything else. Like kstatus, it goes by conditions that are about the present generation only:
-- status.observedGeneration is -1 until the controller has seen the object.

local health = { status = "Progressing", message = "the controller has not seen it yet" }

local status = obj.status
if status == nil or status.observedGeneration ~= obj.metadata.generation then
  return health
end

local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end

local ready, stalled = conditions.Ready, conditions.Stalled
if stalled ~= nil and stalled.status == "True" then
  health.status = "Degraded"
  health.message = stalled.reason .. ": " .. stalled.message
elseif ready ~= nil then
  health.message = ready.reason .. ": " .. ready.message
  if ready.status == "True" then
    health.status = "Healthy"
  elseif ready.reason == "Suspended" then
    health.status = "Suspended"
  end
end

return health
