//! Signatures of Standard Webhooks 1.0 and the secrets they are made with.
//!
//! The operator holds masters; a receiver holds a secret derived for its namespace and origin. So a receiver that knows
//! its own secret can't forge deliveries to another, nor can a namespace sign as its neighbour.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use url::Url;

use crate::kinds::{NO_NAMESPACE, SettingsError};

/// Shorter ones could be guessed from a single delivery.
const MIN_MASTER_CHARS: usize = 16;
/// The new one and the one before it.
const MAX_MASTERS: usize = 2;

/// The operator's master secrets (`JOBREQUEST_WEBHOOK_SECRET`), the newest first.
#[derive(Clone, Default)]
pub struct WebhookMasters(Vec<String>);

/// What one receiver verifies deliveries with. Displays as `whsec_` and base64, the form the libraries take.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookSecret([u8; 32]);

impl WebhookMasters {
    /// One master, or two separated by a comma while receivers change over: the newest first.
    ///
    /// # Errors
    /// When there are more than two, or one has less than 16 characters.
    pub fn parse(text: &str) -> Result<Self, SettingsError> {
        let masters: Vec<String> =
            text.split(',').map(str::trim).filter(|m| !m.is_empty()).map(str::to_owned).collect();
        if masters.len() > MAX_MASTERS {
            return Err(SettingsError::new("the webhook secret takes at most two values, the new one and the old one"));
        }
        if masters.iter().any(|master| master.chars().count() < MIN_MASTER_CHARS) {
            return Err(SettingsError::new("the webhook secret must have at least 16 characters"));
        }
        Ok(Self(masters))
    }

    /// The secrets with which deliveries from this namespace to this URL's origin are signed, one for each master.
    /// Rows enqueued in SQL have no namespace and secrets of their own.
    pub fn secrets(&self, namespace: Option<&str>, url: &Url) -> Vec<WebhookSecret> {
        let origin = url.origin().ascii_serialization();
        self.0.iter().map(|master| derive(master, namespace.unwrap_or(NO_NAMESPACE), &origin)).collect()
    }
}

impl std::fmt::Debug for WebhookMasters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WebhookMasters({} hidden)", self.0.len())
    }
}

impl WebhookSecret {
    /// `v1,` and the base64 of the HMAC-SHA256 over `id.timestamp.body`.
    pub(super) fn sign(&self, id: &str, timestamp: u64, body: &[u8]) -> String {
        let mac = hmac(&self.0, &[id.as_bytes(), b".", timestamp.to_string().as_bytes(), b".", body]);
        format!("v1,{}", STANDARD.encode(mac))
    }
}

impl std::fmt::Display for WebhookSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "whsec_{}", STANDARD.encode(self.0))
    }
}

impl std::fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WebhookSecret(hidden)")
    }
}

/// HKDF-SHA256 (RFC 5869) with one block of output: the salt names the use, the info the namespace and the origin.
/// A namespace holds no NUL and no origin does, so no two pairs give the same info.
fn derive(master: &str, namespace: &str, origin: &str) -> WebhookSecret {
    let extracted = hmac(b"jobrequest/webhook/v1", &[master.as_bytes()]);
    WebhookSecret(hmac(&extracted, &[namespace.as_bytes(), b"\0", origin.as_bytes(), &[1]]))
}

fn hmac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}
