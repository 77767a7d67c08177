use super::*;

use serde_json::json;

/// main installs the provider before anything else; tests have no main.
pub(crate) fn install_crypto() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

#[test]
fn all_four_kinds_are_registered() {
    install_crypto();
    let registry = Registry::builtin(&KindSettings::default()).unwrap();
    assert_eq!(registry.kinds(), ["resize_image", "send_email", "summarize_text", "webhook_delivery"]);
}

#[test]
fn the_least_payload_of_every_kind_is_accepted_and_each_missing_field_is_named() {
    for (kind, payload) in [
        ("send_email", json!({"to": "a@example.com", "subject": "Hi", "body": "Hello"})),
        ("resize_image", json!({"source_url": "https://example.com/a.png", "width": 1, "height": 1})),
        ("summarize_text", json!({"text": "One. Two."})),
        ("webhook_delivery", json!({"url": "https://example.com/", "body": {}})),
    ] {
        assert_eq!(validate(kind, &payload), Ok(()), "{kind}");
        for field in payload.as_object().unwrap().keys() {
            let mut without = payload.clone();
            without.as_object_mut().unwrap().remove(field);
            assert_eq!(
                validate(kind, &without).unwrap_err(),
                PayloadError { field: field.clone(), problem: "is required".to_owned() }
            );
            let mut foreign = payload.clone();
            foreign["bodyy"] = json!("secret");
            assert_eq!(validate(kind, &foreign).unwrap_err().field, "bodyy");
        }
    }
}

#[test]
fn a_kind_that_is_not_built_in_is_taken_as_it_is() {
    assert_eq!(validate("transcode_video", &json!([1, 2])), Ok(()));
}
