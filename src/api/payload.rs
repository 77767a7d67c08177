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
    /// bob@example.com". One line of 3 to 32768 characters; at most 100 recipients with `cc` and `bcc`.
    #[schemars(length(min = 3, max = 32768))]
    #[x_kube(validation = address_list())]
    pub to: Option<String>,

    /// send_email: recipients of a copy, written as in `to`. At most 32768 characters; may be empty.
    #[schemars(length(max = 32768))]
    #[x_kube(validation = address_list())]
    pub cc: Option<String>,

    /// send_email: recipients of a copy whom the others don't see, written as in `to`. At most 32768 characters; may
    /// be empty.
    #[schemars(length(max = 32768))]
    #[x_kube(validation = address_list())]
    pub bcc: Option<String>,

    /// send_email: where answers go, written as in `to`. At most 32768 characters; may be empty.
    #[schemars(length(max = 32768))]
    #[x_kube(validation = address_list())]
    pub reply_to: Option<String>,

    /// send_email, required: the subject. One line of at most 998 characters; may be empty.
    #[schemars(length(max = 998))]
    #[x_kube(validation = Rule::new(r"!self.matches('[\\x01-\\x1f\\x7f]')")
        .message("must be one line without control characters: remove them"))]
    pub subject: Option<String>,

    /// send_email, required: the mail's text, a string. webhook_delivery, required: what is sent, any JSON.
    #[schemars(schema_with = "super::crd::any_json_schema")]
    pub body: Option<Value>,

    /// send_email: the mail as HTML, beside `body` for readers without HTML. At most 1048576 characters.
    #[schemars(length(max = 1_048_576))]
    pub html: Option<String>,

    /// resize_image, required: where the picture is: an http:// or https:// URL, or s3://, gs:// or az:// for an
    /// object of this namespace in the operator's store. At most 2048 characters.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = url_of(&["http", "https", "s3", "gs", "az"])
        .message("must be an absolute URL that begins with http://, https://, s3://, gs:// or az://, without user name or password"))]
    pub source_url: Option<String>,

    /// resize_image, required: the box's width in pixels, 1 to 8192; width times height at most 40000000.
    #[schemars(range(min = 1, max = 8192))]
    pub width: Option<i32>,

    /// resize_image, required: the box's height in pixels, 1 to 8192; width times height at most 40000000.
    #[schemars(range(min = 1, max = 8192))]
    pub height: Option<i32>,

    /// resize_image: how the picture gets into the box. contain (the default): it fits into the box and keeps its
    /// proportions. cover: it covers the box, what sticks out is cut off. fill: it is stretched to the box.
    #[schemars(extend("enum" = ["contain", "cover", "fill"]))]
    pub fit: Option<String>,

    /// resize_image: the result's format: png, jpeg or webp. The default is what the destination's ending says, else
    /// the source's format.
    #[schemars(extend("enum" = ["png", "jpeg", "webp"]))]
    pub format: Option<String>,

    /// resize_image: the result's key in the operator's store, below this namespace's prefix, such as
    /// "thumbnails/42.png". The default is made from the job's id. At most 512 characters; letters, digits, spaces and
    /// . _ - + = @ , ( ) in parts of at most 200 bytes.
    #[schemars(length(min = 1, max = 512))]
    #[x_kube(validation = Rule::new(r"self.matches('^[\\pL\\pM\\pN_+=@,() -][\\pL\\pM\\pN._+=@,() -]*(/[\\pL\\pM\\pN_+=@,() -][\\pL\\pM\\pN._+=@,() -]*)*$')")
        .message("must be a relative key such as thumbnails/42.png: no part of it empty or beginning with a dot, only letters, digits, spaces and . _ - + = @ , ( )"))]
    pub destination: Option<String>,

    /// summarize_text, required: the text. 1 to 1048576 characters, not blank.
    #[schemars(length(min = 1, max = 1_048_576))]
    #[x_kube(validation = Rule::new(r"self.matches('\\S')").message("must not be blank: put the text here"))]
    pub text: Option<String>,

    /// summarize_text: the summary's longest length in words, 1 to 10000. The default is 100.
    #[schemars(range(min = 1, max = 10000))]
    pub max_words: Option<i32>,

    /// webhook_delivery, required: where it goes, an absolute http:// or https:// URL. At most 2048 characters.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = url_of(&["http", "https"])
        .message("must be an absolute URL that begins with http:// or https://, without user name or password"))]
    pub url: Option<String>,

    /// webhook_delivery: the HTTP method: POST (the default), PUT or PATCH.
    #[schemars(extend("enum" = ["POST", "PUT", "PATCH"]))]
    pub method: Option<String>,

    /// webhook_delivery: further headers, at most 50, each name at most 128 characters, each value at most 4096 of
    /// printable ASCII. Content-Type is application/json unless given here. Headers of the connection, of proxies and
    /// of the signature (webhook-*) can't be set.
    #[schemars(schema_with = "super::crd::headers_schema")]
    pub headers: Option<BTreeMap<String, String>>,
}

/// Roughly: something with an @ in one line. Whether each address is one is looked at when the job is accepted.
fn address_list() -> Rule {
    Rule::new(r"self == '' || self.matches('^[^\\x01-\\x1f\\x7f]*[^\\s,<>@]@[^\\s,<>@][^\\x01-\\x1f\\x7f]*$')").message(
        "must be e-mail addresses in one line, such as ada@example.com or Ada <ada@example.com>, bob@example.com",
    )
}

fn url_of(schemes: &[&str]) -> Rule {
    let schemes = schemes.iter().map(|scheme| format!("'{scheme}'")).collect::<Vec<_>>().join(", ");
    Rule::new(format!(
        "isURL(self) && url(self).getScheme() in [{schemes}] && url(self).getHostname() != '' && !self.matches('^[^/]*//[^/?#]*@')"
    ))
}
