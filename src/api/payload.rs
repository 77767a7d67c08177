//! The fields of `spec.payload`: their schema, and which kind takes which.

use std::collections::BTreeMap;

use kube::KubeSchema;
use kube::core::Rule;
use serde_json::Value;

/// What a kind of job takes. Its rules in the CRD are made from this, so a new kind is one entry here and its fields
/// in [`PayloadFields`].
pub(super) struct KindFields {
    pub kind: &'static str,
    pub required: &'static [&'static str],
    pub optional: &'static [&'static str],
}

pub(super) const KIND_FIELDS: [KindFields; 4] = [
    KindFields {
        kind: "send_email",
        required: &["to", "subject", "body"],
        optional: &["html", "cc", "bcc", "reply_to"],
    },
    KindFields {
        kind: "resize_image",
        required: &["source_url", "width", "height"],
        optional: &["fit", "format", "destination"],
    },
    KindFields { kind: "summarize_text", required: &["text"], optional: &["max_words"] },
    KindFields { kind: "webhook_delivery", required: &["url", "body"], optional: &["headers", "method"] },
];

/// Every kind's fields in one object, as `kubectl explain` shows them. It exists for its schema only: the payload
/// itself stays the text that the API server sent.
#[derive(KubeSchema)]
#[expect(dead_code, reason = "only the schema is used")]
pub(super) struct PayloadFields {
    /// send_email, required: the recipients, as in a mail's To header: "ada@example.com" or "Ada <ada@example.com>,
    /// bob@example.com". One line, 3 to 4096 characters.
    #[schemars(length(min = 3, max = 4096))]
    #[x_kube(validation = address_list())]
    pub to: Option<String>,

    /// send_email: recipients of a copy, written as in `to`.
    #[schemars(length(min = 3, max = 4096))]
    #[x_kube(validation = address_list())]
    pub cc: Option<String>,

    /// send_email: recipients of a copy whom the others don't see, written as in `to`.
    #[schemars(length(min = 3, max = 4096))]
    #[x_kube(validation = address_list())]
    pub bcc: Option<String>,

    /// send_email: where answers go, written as in `to`.
    #[schemars(length(min = 3, max = 4096))]
    #[x_kube(validation = address_list())]
    pub reply_to: Option<String>,

    /// send_email, required: the subject. One line, at most 998 characters.
    #[schemars(length(max = 998))]
    #[x_kube(validation = Rule::new("!self.matches('[\\r\\n]')")
        .message("must be one line: remove its line breaks"))]
    pub subject: Option<String>,

    /// send_email, required: the mail's text, a string. webhook_delivery, required: what is sent, any JSON.
    #[schemars(schema_with = "super::crd::any_json_schema")]
    pub body: Option<Value>,

    /// send_email: the mail as HTML, beside `body` for readers without HTML. At most 524288 characters.
    #[schemars(length(max = 524288))]
    pub html: Option<String>,

    /// resize_image, required: where the picture is: an http:// or https:// URL, or s3://, gs:// or az:// for an
    /// object of this namespace in the operator's store. At most 2048 characters.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new(
        "isURL(self) && url(self).getScheme() in ['http', 'https', 's3', 'gs', 'az'] && url(self).getHostname() != ''")
        .message("must be an absolute URL that starts with http://, https://, s3://, gs:// or az://"))]
    pub source_url: Option<String>,

    /// resize_image, required: the box's width in pixels, 1 to 10000.
    #[schemars(range(min = 1, max = 10000))]
    pub width: Option<i32>,

    /// resize_image, required: the box's height in pixels, 1 to 10000.
    #[schemars(range(min = 1, max = 10000))]
    pub height: Option<i32>,

    /// resize_image: how the picture gets into the box. contain (the default): it fits into the box and keeps its
    /// proportions. cover: it covers the box, what sticks out is cut off. fill: it is stretched to the box.
    #[schemars(extend("enum" = ["contain", "cover", "fill"]))]
    pub fit: Option<String>,

    /// resize_image: the result's format: png, jpeg or webp. The default is the source's, png if that isn't one of these.
    #[schemars(extend("enum" = ["png", "jpeg", "webp"]))]
    pub format: Option<String>,

    /// resize_image: the result's key in the operator's store, below this namespace's prefix, such as
    /// "thumbnails/picture.png". The default is made from the job's id. At most 900 characters.
    #[schemars(length(min = 1, max = 900))]
    #[x_kube(validation = Rule::new(
        "self.matches('^[^/\\\\\\\\\\\\x00-\\\\x1f\\\\x7f]+(/[^/\\\\\\\\\\\\x00-\\\\x1f\\\\x7f]+)*$') && !self.matches('(^|/)[.][.]?(/|$)')")
        .message("must be a relative key such as thumbnails/picture.png: no slash at its start or end, no //, no backslash, no . or .. as a part, and no URL"))]
    pub destination: Option<String>,

    /// summarize_text, required: the text. 1 to 524288 characters.
    #[schemars(length(min = 1, max = 524288))]
    pub text: Option<String>,

    /// summarize_text: the summary's longest length in words, 1 to 10000. The default is 100.
    #[schemars(range(min = 1, max = 10000))]
    pub max_words: Option<i32>,

    /// webhook_delivery, required: where it goes, an absolute http:// or https:// URL. At most 2048 characters.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new(
        "isURL(self) && url(self).getScheme() in ['http', 'https'] && url(self).getHostname() != ''")
        .message("must be an absolute URL that starts with http:// or https://"))]
    pub url: Option<String>,

    /// webhook_delivery: the HTTP method: POST (the default), PUT or PATCH.
    #[schemars(extend("enum" = ["POST", "PUT", "PATCH"]))]
    pub method: Option<String>,

    /// webhook_delivery: further headers, at most 50; each name at most 128 characters, each value one line of at most
    /// 4096. The operator sets Content-Type (unless given here), Content-Length, Host and the webhook-* headers.
    #[schemars(schema_with = "super::crd::headers_schema")]
    pub headers: Option<BTreeMap<String, String>>,
}

fn address_list() -> Rule {
    Rule::new("self.matches('^[^\\r\\n]*[^\\r\\n\\t ,<>@]@[^\\r\\n\\t ,<>@][^\\r\\n]*$')").message(
        "must be e-mail addresses in one line, such as ada@example.com or Ada <ada@example.com>, bob@example.com",
    )
}
