//! Whether the cluster's CRD knows what this program writes and reads: an older one makes the API server drop fields, and
//! nothing else would say so.

use std::convert::Infallible;
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionVersion, JSONSchemaProps,
};
use kube::{Api, Client};

use super::{Error, patch};
use crate::admin::{Beat, Part};
use crate::api;

const EVERY: Duration = Duration::from_secs(60);
/// While it is not as it should be: somebody is about to mend it.
const SOON: Duration = Duration::from_secs(5);
const BEAT: Duration = Duration::from_secs(10);
/// How many fields are named.
const NAMED: usize = 3;

/// Looks now and then. A CRD that can't be read for a while says nothing: the watch does.
pub(super) async fn watch(client: Client, part: Part, beat: Beat) -> Infallible {
    let ours = api::crd();
    let name = ours.metadata.name.clone().unwrap_or_default();
    let definitions: Api<CustomResourceDefinition> = Api::all(client);
    loop {
        beat.beat();
        match patch::bounded(definitions.get(&name)).await {
            Ok(theirs) => match missing(&ours, &theirs).as_slice() {
                [] => part.ready(),
                fields => part.not_ready(format!(
                    "{} of its fields are not in the cluster's definition, such as {}: the CRD {name} is older than this \
                     program; apply what `jobrequest crd` prints, or install the chart with crds.enabled",
                    fields.len(),
                    fields[..fields.len().min(NAMED)].join(", "),
                )),
            },
            Err(Error::Api(kube::Error::Api(status))) if matches!(status.code, 401 | 403) => {
                part.not_ready(format!("may not read the CRD {name}: {} {}", status.code, status.reason));
            }
            Err(error) => tracing::debug!(error = %error, "the CRD can't be read"),
        }
        let mut left = if part.is_ready() { EVERY } else { SOON };
        while !left.is_zero() {
            let nap = left.min(BEAT);
            tokio::time::sleep(nap).await;
            left -= nap;
            beat.beat();
        }
    }
}

/// Paths of the fields that this program has and the cluster's definition of the same version lacks.
fn missing(ours: &CustomResourceDefinition, theirs: &CustomResourceDefinition) -> Vec<String> {
    let mut paths = Vec::new();
    for version in &ours.spec.versions {
        match theirs.spec.versions.iter().find(|known| known.name == version.name && known.served) {
            Some(known) => compare(schema(version), schema(known), "", &mut paths),
            None => paths.push(format!("the version {}", version.name)),
        }
    }
    paths
}

fn schema(version: &CustomResourceDefinitionVersion) -> Option<&JSONSchemaProps> {
    version.schema.as_ref()?.open_api_v3_schema.as_ref()
}

fn compare(ours: Option<&JSONSchemaProps>, theirs: Option<&JSONSchemaProps>, path: &str, paths: &mut Vec<String>) {
    let (Some(ours), Some(theirs)) = (ours, theirs) else {
        if ours.is_some() {
            paths.push(path.trim_start_matches('.').to_owned());
        }
        return;
    };
    let known = theirs.properties.as_ref();
    for (name, field) in ours.properties.iter().flatten() {
        compare(Some(field), known.and_then(|known| known.get(name)), &format!("{path}.{name}"), paths);
    }
    compare(items(ours), items(theirs), &format!("{path}[]"), paths);
}

fn items(schema: &JSONSchemaProps) -> Option<&JSONSchemaProps> {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::JSONSchemaPropsOrArray::Schema;
    match &schema.items {
        Some(Schema(items)) => Some(items),
        Some(_) | None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without(pointer: &str, field: &str) -> CustomResourceDefinition {
        let mut crd = serde_json::to_value(api::crd()).expect("a CRD is JSON");
        let root = &mut crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let fields = root.pointer_mut(pointer).and_then(|fields| fields.as_object_mut()).expect(pointer);
        assert!(fields.remove(field).is_some(), "{field}");
        serde_json::from_value(crd).expect("still one")
    }

    #[test]
    fn a_definition_that_lacks_a_field_is_older_and_one_that_has_more_is_not() {
        let ours = api::crd();
        assert!(missing(&ours, &ours).is_empty());
        let older = without("/properties/spec/properties", "suspend");
        assert_eq!(missing(&ours, &older), ["spec.suspend"]);
        assert!(missing(&older, &ours).is_empty());
        let older = without("/properties/status/properties/history/items/properties", "outcome");
        assert_eq!(missing(&ours, &older), ["status.history[].outcome"]);
        let mut unserved = ours.clone();
        unserved.spec.versions[0].served = false;
        assert_eq!(missing(&ours, &unserved), [format!("the version {}", ours.spec.versions[0].name)]);
    }
}
