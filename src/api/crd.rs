//! The CustomResourceDefinition: what the derives make of the types, and what they can't say.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::JobRequest;
use super::payload::{KIND_FIELDS, KindFields};
use super::status::{AttemptRecord, HISTORY_LIMIT};

/// The definition that the API server needs before it takes a JobRequest.
pub fn crd() -> CustomResourceDefinition {
    serde_json::from_value(crd_json()).expect("the derived CRD and what is added to it are a CRD")
}

/// [`crd`] as YAML: the same text for the same types, with sorted keys.
pub fn crd_yaml() -> String {
    let yaml = serde_yaml::to_string(&crd_json()).expect("JSON can be written as YAML");
    format!("# Made from src/api.rs by `make generate`: don't edit.\n{yaml}")
}

fn crd_json() -> Value {
    let mut crd = serde_json::to_value(JobRequest::crd()).expect("a CRD has string keys");
    let root = &mut crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let spec = &mut root["properties"]["spec"];
    spec["required"] = json!(["kind", "payload"]);
    spec["properties"]["payload"]["required"] = Value::Null; // depends on the kind: below
    if let Value::Array(rules) = &mut spec["x-kubernetes-validations"] {
        rules.push(json!({
            "rule": "!has(self.payload.width) || !has(self.payload.height) || self.payload.width * self.payload.height <= 40000000",
            "message": "width times height must be at most 40000000: make one of them smaller",
            "fieldPath": ".payload.width",
        }));
        rules.extend(KIND_FIELDS.iter().flat_map(field_rules));
    }
    spec["allOf"] = KIND_FIELDS.iter().flat_map(body_rules).collect();
    // A fresh object must not pass for a finished one (kstatus compares this with metadata.generation).
    root["properties"]["status"]["default"] = json!({"observedGeneration": -1});
    tidy(&mut crd);
    crd
}

/// What CEL can't say, because it only sees fields that have a type, and `body` has none: whether it is there, and
/// whether it is a string. In a schema, "if kind then payload" reads "not kind, or payload".
fn body_rules(fields: &KindFields) -> Vec<Value> {
    let kind = fields.kind;
    let if_kind_then = |alternatives: &[Value]| {
        let other_kind = json!({"not": {"required": ["kind"], "properties": {"kind": {"enum": [kind]}}}});
        let payloads = alternatives.iter().map(|payload| json!({"properties": {"payload": payload}}));
        json!({"anyOf": std::iter::once(other_kind).chain(payloads).collect::<Vec<_>>()})
    };
    // A value that nobody means, allowed only because the API server's message quotes what is allowed.
    let hint = |text: String| json!({"properties": {"body": {"enum": [text]}}});
    if !fields.required.contains(&"body") {
        return vec![if_kind_then(&[hint(format!("remove it: {kind} takes no body"))])];
    }
    // Having all fields implies having this one: the message names whatever else is missing, and nothing else changes.
    let present = if_kind_then(&[json!({"required": fields.required}), json!({"required": ["body"]})]);
    if kind != "send_email" {
        return vec![present];
    }
    // `type` isn't allowed here. A pattern that nothing matches fails for strings only; of a null, `not` isn't looked at.
    let is_null = json!({"required": ["body"], "properties": {"body": {"not": {"minLength": 0}}}});
    let text = json!({"not": is_null, "properties": {"body": {"not": {"pattern": "$.^"}}}});
    vec![present, if_kind_then(&[hint("a string: the mail's text".into()), text])]
}

/// A kind's required fields, and the refusal of its fields under other kinds, each under the field's own path.
fn field_rules(fields: &KindFields) -> impl Iterator<Item = Value> {
    let kind = fields.kind;
    let visible = |field: &&&str| **field != "body";
    let required = fields.required.iter().filter(visible).map(move |field| {
        json!({
            "rule": format!("self.kind != '{kind}' || has(self.payload.{field})"),
            "message": format!("{kind} needs it: add it to the payload"),
            "fieldPath": format!(".payload.{field}"),
            "reason": "FieldValueRequired",
        })
    });
    let foreign = fields.required.iter().chain(fields.optional).filter(visible).map(move |field| {
        json!({
            "rule": format!("self.kind == '{kind}' || !has(self.payload.{field})"),
            "message": format!("is for {kind} only: remove it"),
            "fieldPath": format!(".payload.{field}"),
            "reason": "FieldValueForbidden",
        })
    });
    required.chain(foreign)
}

/// Takes out what the API server drops anyhow (nulls, empty lists), so that nobody finds a difference; int32, as bounds
/// say it better; and `nullable` beside `enum`, which would have to list null. Elsewhere `nullable` stays: server-side
/// apply keeps an explicit null, and it means the same as leaving the field out.
fn tidy(value: &mut Value) {
    match value {
        Value::Object(members) => {
            let is_enum = members.contains_key("enum");
            members.retain(|name, member| {
                !member.is_null()
                    && *member != json!([])
                    && (name != "nullable" || !is_enum)
                    && (name != "format" || *member != "int32")
            });
            if let Some(Value::String(text)) = members.get_mut("description") {
                *text = text.replace('\n', " ");
            }
            members.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        Value::Number(number) => {
            // Bounds are floats in the CRD's types; every one of ours is a whole number.
            if let Some(whole) = number.as_f64().filter(|n| n.fract() == 0.0) {
                *value = json!(whole as i64);
            }
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

pub(super) fn kind_schema(_: &mut SchemaGenerator) -> Schema {
    let kinds = KIND_FIELDS.map(|fields| fields.kind);
    json_schema!({"type": "string", "enum": kinds})
}

/// Any JSON, null as well.
pub(super) fn any_json_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"x-kubernetes-preserve-unknown-fields": true, "nullable": true})
}

/// Headers that the executor of webhook_delivery doesn't let a payload set; lower case.
const RESERVED_HEADERS: &str = "^(host|content-length|transfer-encoding|connection|keep-alive|te|trailer|upgrade|expect\
    |http2-settings|forwarded|metadata|metadata-flavor|x-google-metadata-request\
    |proxy-.*|webhook-.*|x-aws-ec2-metadata-.*|x-forwarded-.*)$";

pub(super) fn headers_schema(_: &mut SchemaGenerator) -> Schema {
    let names = "self.all(name, name.matches('^[-!#$%&*+.^_`|~0-9A-Za-z]{1,128}$'))";
    let free = format!("!self.exists(name, name.lowerAscii().matches('{RESERVED_HEADERS}'))");
    json_schema!({
        "type": "object",
        "additionalProperties": {
            "type": "string",
            "maxLength": 4096,
            "x-kubernetes-validations": [
                {"rule": r"self.matches('^[\\t\\x20-\\x7e]*$')", "message": "must be one line of printable ASCII"},
            ],
        },
        "maxProperties": 50,
        "nullable": true,
        "x-kubernetes-validations": [
            {"rule": names, "message": "holds a name that isn't a header's: use only letters, digits and !#$%&*+-.^_`|~, at most 128"},
            {"rule": free, "message": "holds a header that JobRequest sets or that belongs to the connection (host, content-length, connection, forwarded, metadata, proxy-*, webhook-*, x-forwarded-* and so on): remove it"},
        ],
    })
}

/// An object of any content. Atomic, so that `managedFields` doesn't repeat its nesting.
pub(super) fn result_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "x-kubernetes-map-type": "atomic",
    })
}

pub(super) fn history_schema(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": HISTORY_LIMIT,
        "items": generator.subschema_for::<AttemptRecord>(),
        "x-kubernetes-list-type": "atomic",
    })
}

/// metav1.Condition with the limits that Kubernetes' own types have.
pub(super) fn conditions_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "description": "One aspect of the resource's state.",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {
                    "type": "string",
                    "description": "Which aspect, in CamelCase.",
                    "maxLength": 316,
                    "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
                },
                "status": {"type": "string", "description": "Whether it is so.", "enum": ["True", "False", "Unknown"]},
                "lastTransitionTime": {"type": "string", "format": "date-time", "description": "When status last changed."},
                "reason": {
                    "type": "string",
                    "description": "Why, in one stable CamelCase word.",
                    "minLength": 1,
                    "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                },
                "message": {"type": "string", "description": "Why, in a sentence.", "maxLength": 32768},
                "observedGeneration": {
                    "type": "integer",
                    "format": "int64",
                    "minimum": 0,
                    "description": "The metadata.generation that this is about.",
                },
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/crds/jobrequests.yaml");

    #[test]
    fn the_committed_crd_is_the_generated_one() {
        let committed = std::fs::read_to_string(COMMITTED).unwrap_or_default();
        assert!(committed == crd_yaml(), "crds/jobrequests.yaml is out of date: run `make generate`");
    }

    #[test]
    fn the_yaml_reads_back_as_the_crd() {
        assert_eq!(serde_yaml::from_str::<CustomResourceDefinition>(&crd_yaml()).unwrap(), crd());
    }

    #[test]
    fn no_tool_can_read_the_crd_in_another_way() {
        fn check(path: &str, value: &Value) {
            match value {
                Value::Null => panic!("{path} is null"),
                Value::Array(items) => {
                    assert!(!items.is_empty(), "{path} is empty");
                    items.iter().enumerate().for_each(|(i, item)| check(&format!("{path}[{i}]"), item));
                }
                Value::Object(members) => members.iter().for_each(|(k, v)| check(&format!("{path}.{k}"), v)),
                Value::Number(n) => {
                    assert!(n.as_i64().is_some_and(|n| n.unsigned_abs() < 1 << 53), "{path} is {n}");
                }
                Value::Bool(_) | Value::String(_) => {}
            }
        }
        check("crd", &crd_json());
    }

    #[test]
    fn each_field_of_the_payload_belongs_to_a_kind_and_is_described() {
        let crd = crd_json();
        let payload =
            &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["payload"];
        let in_schema: BTreeSet<_> = payload["properties"].as_object().unwrap().keys().map(String::as_str).collect();
        let of_kinds: BTreeSet<_> =
            KIND_FIELDS.iter().flat_map(|kind| kind.required.iter().chain(kind.optional)).copied().collect();
        assert_eq!(in_schema, of_kinds);
        for kind in KIND_FIELDS {
            for field in kind.required {
                let text = payload["properties"][field]["description"].as_str().unwrap();
                assert!(text.contains(&format!("{}, required:", kind.kind)), "{field}: {text}");
            }
            for field in kind.optional {
                let text = payload["properties"][field]["description"].as_str().unwrap();
                assert!(text.contains(&format!("{}: ", kind.kind)), "{field}: {text}");
            }
        }
    }
}
