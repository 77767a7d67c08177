{{- /* Names. The full name is cut at 35, so that <full name>-worker-<pool of at most 20> stays within 63. */ -}}
{{- define "jobrequest.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 35 | trimSuffix "-" }}
{{- end }}

{{- define "jobrequest.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 35 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 35 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 35 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* For objects outside the release's namespace: two teams may both call their release "jobrequest". */ -}}
{{- define "jobrequest.clusterName" -}}
{{- printf "%s:%s-%s" .root.Release.Namespace (include "jobrequest.fullname" .root) .suffix }}
{{- end }}

{{- /* The same for policies, whose names may hold no colon. */ -}}
{{- define "jobrequest.policyName" -}}
{{- printf "%s.%s.%s" .suffix (include "jobrequest.fullname" .root) .root.Release.Namespace }}
{{- end }}

{{- define "jobrequest.controller.serviceAccountName" -}}
{{- with .Values.controller.serviceAccount }}
{{- if .create }}
{{- default (printf "%s-controller" (include "jobrequest.fullname" $)) .name }}
{{- else }}
{{- required "controller.serviceAccount.name: say which ServiceAccount to use, or set controller.serviceAccount.create" .name }}
{{- end }}
{{- end }}
{{- end }}

{{- define "jobrequest.worker.serviceAccountName" -}}
{{- with .Values.workerServiceAccount }}
{{- if .create }}
{{- default (printf "%s-worker" (include "jobrequest.fullname" $)) .name }}
{{- else }}
{{- default "default" .name }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The Lease's name, as the controller makes it from JOBREQUEST_INSTALL. */ -}}
{{- define "jobrequest.leaseName" -}}
{{- printf "jobrequest-%s" .Values.settings.install }}
{{- end }}

{{- /* Labels. Give (dict "root" $ "component" "...") and, for a pool, "pool". */ -}}
{{- define "jobrequest.selectorLabels" -}}
app.kubernetes.io/name: {{ include "jobrequest.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
jobrequest.dev/pool: {{ . }}
{{- end }}
{{- end }}

{{- define "jobrequest.labels" -}}
{{ include "jobrequest.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: jobrequest
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* What the controller may do with the JobRequests it watches: in a ClusterRole, or in a Role for each namespace. */ -}}
{{- define "jobrequest.controller.namespacedRules" -}}
- apiGroups: [jobrequest.dev]
  resources: [jobrequests]
  verbs: [delete, get, list, watch]
- apiGroups: [jobrequest.dev]
  resources: [jobrequests/status]
  verbs: [patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}

{{- /* The labels by which PromQL finds this install's metrics. */ -}}
{{- define "jobrequest.metricsSelector" -}}
{{- .Values.metrics.selector | default (printf "namespace=%q" .Release.Namespace) }}
{{- end }}

{{- define "jobrequest.image" -}}
{{- with .Values.image -}}
{{- with .registry }}{{ . }}/{{ end }}{{ .repository }}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- /*
A pool with the defaults it doesn't replace, as YAML. Shallow: a pool's `resources` are all its resources. The chart's own
blocks are filled up key by key.
*/ -}}
{{- define "jobrequest.pool" -}}
{{- $pool := dict }}
{{- range $key, $value := .root.Values.workerDefaults }}{{ $_ := set $pool $key $value }}{{ end }}
{{- range $key, $value := .pool }}{{ $_ := set $pool $key $value }}{{ end }}
{{- range list "autoscaling" "podDisruptionBudget" }}
{{- $_ := set $pool . (mergeOverwrite (dict) (get $.root.Values.workerDefaults . | deepCopy) (get $pool . | default dict)) }}
{{- end }}
{{- toYaml $pool }}
{{- end }}

{{- /* Environment. A program's own variables are joined with the user's by "jobrequest.env"; the user's win. */ -}}
{{- define "jobrequest.env" -}}
{{- $theirs := .theirs | default list }}
{{- $names := list }}
{{- range $theirs }}{{ $names = append $names .name }}{{ end }}
{{- $env := list }}
{{- range .ours | fromYamlArray }}{{ if not (has .name $names) }}{{ $env = append $env . }}{{ end }}{{ end }}
{{- toYaml (concat $env $theirs) }}
{{- end }}

{{- define "jobrequest.env.database" -}}
- name: DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.database.existingSecret }}, key: {{ .Values.database.urlKey }}}}
{{- with .Values.database.directUrlKey }}
- name: JOBREQUEST_DATABASE_DIRECT_URL
  valueFrom: {secretKeyRef: {name: {{ $.Values.database.existingSecret }}, key: {{ . }}}}
{{- end }}
{{- end }}

{{- /* Roots to trust, in a ConfigMap or a Secret. Give (dict "root" $). */ -}}
{{- define "jobrequest.caBundle.enabled" -}}
{{- if or .root.Values.caBundle.existingConfigMap .root.Values.caBundle.existingSecret }}true{{ end }}
{{- end }}

{{- define "jobrequest.caBundle.volume" -}}
{{- with .root.Values.caBundle }}
- name: ca-bundle
  {{- if .existingConfigMap }}
  configMap: {name: {{ .existingConfigMap }}, items: [{key: {{ .key }}, path: ca.crt}]}
  {{- else }}
  secret: {secretName: {{ .existingSecret }}, items: [{key: {{ .key }}, path: ca.crt}]}
  {{- end }}
{{- end }}
{{- end }}

{{- define "jobrequest.caBundle.mount" -}}
- {name: ca-bundle, mountPath: /etc/jobrequest/ca, readOnly: true}
{{- end }}

{{- /* The Postgres client's own variable; a URL's sslrootcert wins. */ -}}
{{- define "jobrequest.env.databaseRoots" -}}
{{- if and .Values.caBundle.database (include "jobrequest.caBundle.enabled" (dict "root" .)) }}
- {name: PGSSLROOTCERT, value: /etc/jobrequest/ca/ca.crt}
{{- end }}
{{- end }}

{{- /*
Programs read Secrets when they start, so Pods have to be replaced when one changes: an annotation holds the versions of the
Secrets that a Pod reads, as they are when the release is installed or upgraded. Versions, not a hash of the contents, from
which a weak password could be guessed. Where Helm only renders (helm template, Argo CD) there is nothing to look up and no
annotation. Give (dict "root" $ "secrets" <names> "configMaps" <names>).
*/ -}}
{{- define "jobrequest.secretVersions" -}}
{{- $versions := list }}
{{- if .root.Values.rollOnSecretChange }}
{{- range $kind, $names := dict "Secret" .secrets "ConfigMap" .configMaps }}
{{- range $names | compact | uniq | sortAlpha }}
{{- with lookup "v1" $kind $.root.Release.Namespace . }}
{{- $versions = append $versions (printf "%s/%s/%s" $kind .metadata.name .metadata.resourceVersion) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- with $versions }}
jobrequest.dev/secret-versions: {{ join "," . | sha256sum | trunc 16 }}
{{- end }}
{{- end }}

{{- define "jobrequest.env.log" -}}
- {name: JOBREQUEST_LOG, value: {{ .Values.settings.log | quote }}}
- {name: JOBREQUEST_LOG_FORMAT, value: {{ .Values.settings.logFormat | quote }}}
{{- end }}

{{- /* int64, because Helm reads numbers as floats and would write 1000000 as 1e+06. */ -}}
{{- define "jobrequest.env.common" -}}
{{ include "jobrequest.env.database" . }}
{{- include "jobrequest.env.databaseRoots" . }}
{{ include "jobrequest.env.log" . }}
{{- with .Values.settings }}
- {name: JOBREQUEST_INSTALL, value: {{ .install | quote }}}
- {name: JOBREQUEST_LEASE_SECONDS, value: {{ .leaseSeconds | int64 | quote }}}
- {name: JOBREQUEST_RETRY_BASE_SECONDS, value: {{ .retryBaseSeconds | int64 | quote }}}
- {name: JOBREQUEST_RETRY_CAP_SECONDS, value: {{ .retryCapSeconds | int64 | quote }}}
- {name: JOBREQUEST_RETENTION_SECONDS, value: {{ .retentionSeconds | int64 | quote }}}
- {name: JOBREQUEST_KEY_RETENTION_SECONDS, value: {{ .keyRetentionSeconds | int64 | quote }}}
{{- end }}
- {name: JOBREQUEST_HTTP_ADDR, value: "{{ .Values.http.host }}:{{ .Values.http.port | int64 }}"}
{{- end }}

{{- define "jobrequest.env.controller" -}}
{{ include "jobrequest.env.common" . }}
{{- with .Values.watchNamespaces }}
- {name: JOBREQUEST_WATCH_NAMESPACES, value: {{ join "," . | quote }}}
{{- end }}
{{- if not (kindIs "invalid" .Values.controller.defaultTtlSeconds) }}
- {name: JOBREQUEST_DEFAULT_TTL_SECONDS, value: {{ .Values.controller.defaultTtlSeconds | int64 | quote }}}
{{- end }}
{{- with .Values.controller.adoptInstall }}
- {name: JOBREQUEST_ADOPT_INSTALL, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{- /* Whether a pool runs a kind: "true" or nothing. Give (dict "pool" <the pool with its defaults> "kind" <kind>). */ -}}
{{- define "jobrequest.runs" -}}
{{- if or (not .pool.kinds) (has .kind .pool.kinds) }}true{{ end }}
{{- end }}

{{- /* Whether some pool runs a kind. Give (dict "root" $ "kind" <kind>). */ -}}
{{- define "jobrequest.serves" -}}
{{- range .root.Values.workers }}
{{- include "jobrequest.runs" (dict "pool" (include "jobrequest.pool" (dict "root" $.root "pool" .) | fromYaml) "kind" $.kind) }}
{{- end }}
{{- end }}

{{- /* A pool gets no secret of a kind that it doesn't run. Give (dict "root" $ "pool" <the pool with its defaults>). */ -}}
{{- define "jobrequest.env.worker" -}}
{{ include "jobrequest.env.common" .root }}
- {name: JOBREQUEST_POLL_SECONDS, value: {{ .root.Values.settings.pollSeconds | int64 | quote }}}
- {name: JOBREQUEST_CONCURRENCY, value: {{ .pool.concurrency | int64 | quote }}}
- {name: JOBREQUEST_MEMORY_BUDGET_MIB, value: {{ .pool.memoryBudgetMiB | int64 | quote }}}
{{- with .pool.kinds }}
- {name: JOBREQUEST_KINDS, value: {{ join "," . | quote }}}
{{- end }}
- {name: JOBREQUEST_SHUTDOWN_GRACE_SECONDS, value: {{ include "jobrequest.shutdownGraceSeconds" . | quote }}}
{{- if include "jobrequest.runs" (dict "pool" .pool "kind" "send_email") }}
{{- with .root.Values.smtp }}
{{- if .existingSecret }}
- name: JOBREQUEST_SMTP_URL
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .urlKey }}}}
{{- end }}
{{- with .from }}
- {name: JOBREQUEST_SMTP_FROM, value: {{ . | quote }}}
{{- end }}
{{- if .allowPlaintext }}
- {name: JOBREQUEST_SMTP_ALLOW_PLAINTEXT, value: "true"}
{{- end }}
{{- end }}
{{- end }}
{{- if include "jobrequest.runs" (dict "pool" .pool "kind" "webhook_delivery") }}
{{- with .root.Values.webhook }}
{{- if .existingSecret }}
- name: JOBREQUEST_WEBHOOK_SECRET
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .secretKey }}}}
{{- end }}
{{- end }}
{{- end }}
{{- if include "jobrequest.runs" (dict "pool" .pool "kind" "resize_image") }}
{{- with .root.Values.objectStore }}
{{- if .existingClaim }}
- {name: JOBREQUEST_OBJECT_STORE_URL, value: "file:///var/lib/jobrequest"}
{{- else if .url }}
- {name: JOBREQUEST_OBJECT_STORE_URL, value: {{ .url | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- if include "jobrequest.caBundle.enabled" . }}
- {name: JOBREQUEST_EXTRA_CA_FILE, value: /etc/jobrequest/ca/ca.crt}
{{- end }}
{{- with .root.Values.egress.allow }}
- {name: JOBREQUEST_EGRESS_ALLOW, value: {{ join "," . | quote }}}
{{- end }}
{{- with .root.Values.egress.deny }}
- {name: JOBREQUEST_EGRESS_DENY, value: {{ join "," . | quote }}}
{{- end }}
{{- end }}

{{- define "jobrequest.shutdownGraceSeconds" -}}
{{- if kindIs "invalid" .pool.shutdownGraceSeconds }}{{ .root.Values.settings.shutdownGraceSeconds | int64 }}{{ else }}{{ .pool.shutdownGraceSeconds | int64 }}{{ end }}
{{- end }}

{{- /*
Migrations run, by default, in an init container of every Pod: `jobrequest migrate` takes a lock in the database, does what is
missing and ends, so any number of Pods may start at once and in any order. A hook would be wrong in several ways: as
pre-install it comes before a database of the same release, as post-install it deadlocks with `helm --wait` (Pods wait for the
schema, Helm waits for Pods), and `--no-hooks` or a restored database leaves the schema behind until the next upgrade. With
init containers, `--wait` and `--atomic` (`--rollback-on-failure`), Argo CD and Flux see only Deployments that become ready
once the schema is there, and a Pod that meets an empty database mends it. Only this container gets the migration's Secret.
After a roll-back the older program runs on the newer schema; the next migration's author has to allow that.
*/ -}}
{{- define "jobrequest.migrate.container" -}}
- name: migrate
  image: {{ include "jobrequest.image" .root | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [migrate]
  env:
    {{- if .root.Values.migrate.existingSecret }}
    - name: DATABASE_URL
      valueFrom: {secretKeyRef: {name: {{ .root.Values.migrate.existingSecret }}, key: {{ .root.Values.migrate.urlKey }}}}
    {{- else }}
    {{- include "jobrequest.env.database" .root | nindent 4 }}
    {{- end }}
    {{- with include "jobrequest.env.databaseRoots" .root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- include "jobrequest.env.log" .root | nindent 4 }}
  resources:
    {{- toYaml .root.Values.migrate.resources | nindent 4 }}
  securityContext:
    {{- toYaml .root.Values.securityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- if include "jobrequest.caBundle.enabled" . }}
    {{- include "jobrequest.caBundle.mount" . | nindent 4 }}
    {{- end }}
    {{- with .volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- /* Ready means: both stores answer. Alive means only that the process does, so a database that is down restarts nothing. */ -}}
{{- define "jobrequest.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{- /* Where Pods go. Give (dict "spec" <controller or pool> "selector" <labels as YAML>). */ -}}
{{- define "jobrequest.placement" -}}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .spec.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml (merge (dict) . (dict "labelSelector" (dict "matchLabels" ($.selector | fromYaml)))) | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "jobrequest.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "jobrequest.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .budget.maxUnavailable }}
  # A Pod that isn't ready does no work: it must not keep a node from being drained.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "jobrequest.selectorLabels" . | nindent 6 }}
{{- end }}

{{- /* What a schema can't say well: the remedy. `helm lint` lets these pass, installing doesn't. */ -}}
{{- define "jobrequest.validate" -}}
{{- if not .Values.database.existingSecret }}
{{- fail (printf "\n\ndatabase.existingSecret isn't set: name a Secret in namespace %s that holds the Postgres URL. For example:\n  kubectl --namespace %s create secret generic jobrequest-db --from-literal=%s=postgres://user:password@host/database\n  helm ... --set database.existingSecret=jobrequest-db\n" .Release.Namespace .Release.Namespace .Values.database.urlKey) }}
{{- end }}
{{- if and .Values.smtp.existingSecret (not .Values.smtp.from) }}
{{- fail "\n\nsmtp.from isn't set: every mail needs a sender, and the workers don't start without one. For example:\n  --set smtp.from=jobs@example.com\n" }}
{{- end }}
{{- if and .Values.objectStore.url .Values.objectStore.existingClaim }}
{{- fail "\n\nobjectStore.url and objectStore.existingClaim are both set: pictures go to one place, so set one of them.\n" }}
{{- end }}
{{- range $name, $pool := .Values.workers }}
{{- $pool := include "jobrequest.pool" (dict "root" $ "pool" $pool) | fromYaml }}
{{- if and (include "jobrequest.runs" (dict "pool" $pool "kind" "resize_image")) (not $.Values.objectStore.url) (not $.Values.objectStore.existingClaim) }}
{{- fail (printf "\n\nThe worker pool %q runs resize_image, which needs a place for its pictures. One of:\n  --set objectStore.url=s3://bucket/prefix          (or gs://, az://)\n  --set objectStore.existingClaim=NAME              (a PersistentVolumeClaim)\n  --set 'workers.%s.kinds={send_email,summarize_text,webhook_delivery}'          (no resize_image)\n" $name $name) }}
{{- end }}
{{- end }}
{{- end }}
