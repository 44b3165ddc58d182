{{/* Name of all objects of the release. */}}
{{- define "pd-operator.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains "pd-operator" .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-pd-operator" .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Labels that select the operator's pods. The policies that the operator makes for routers let in pods with this name
and component, so neither may be changed by a value. */}}
{{- define "pd-operator.selectorLabels" -}}
app.kubernetes.io/name: pd-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{/* Labels of every object. */}}
{{- define "pd-operator.labels" -}}
{{- $own := dict
  "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-")
  "app.kubernetes.io/name" "pd-operator"
  "app.kubernetes.io/instance" .Release.Name
  "app.kubernetes.io/version" (.Chart.AppVersion | replace "+" "_" | trunc 63 | trimSuffix "-")
  "app.kubernetes.io/managed-by" .Release.Service
  "app.kubernetes.io/part-of" "pd-operator" }}
{{- toYaml (merge $own (omit .Values.commonLabels "app.kubernetes.io/component")) }}
{{- end }}

{{/* The operator's account. */}}
{{- define "pd-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "pd-operator.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{/* Reference of an image. Takes a dict: root, image. */}}
{{- define "pd-operator.image" -}}
{{- $shared := .root.Values.image }}
{{- $registry := .image.registry | default $shared.registry }}
{{- if not $registry }}
{{- fail "image.registry is required: the registry and path that you pushed the images to, see images/README.md" }}
{{- end }}
{{- $name := printf "%s/%s" ($registry | trimSuffix "/") .image.repository }}
{{- if .image.digest }}
{{- printf "%s@%s" $name .image.digest }}
{{- else }}
{{- printf "%s:%s" $name (.image.tag | default $shared.tag | default .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/* Namespaces that are served, as a JSON list; empty: all. */}}
{{- define "pd-operator.namespaces" -}}
{{- if eq .Values.watch.scope "Namespaces" }}
{{- toJson .Values.watch.namespaces }}
{{- else -}}
[]
{{- end }}
{{- end }}

{{/* What the operator may do where it serves. Each verb is used, see tests/cluster/test_rbac.py. */}}
{{- define "pd-operator.rules" -}}
- apiGroups: [pdserving.dev]
  resources: [pddeployments]
  verbs: [list, watch]
- apiGroups: [pdserving.dev]
  resources: [pddeployments/status]
  verbs: [patch]
# Asked for by the admission plugin OwnerReferencesPermissionEnforcement, where that is on: children block the deletion
# of their owner in the foreground.
- apiGroups: [pdserving.dev]
  resources: [pddeployments/finalizers]
  verbs: [update]
# Children. `create` because a server-side apply of an absent object is authorised as both patch and create.
- apiGroups: [""]
  resources: [serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Without `escalate` and `bind`: the operator can give a router only what it has itself, which is the next rule.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
{{- end }}
