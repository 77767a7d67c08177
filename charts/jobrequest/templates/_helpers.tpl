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
  verbs: [create, patch]
{{- end }}
