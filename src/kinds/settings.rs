//! What an operator sets for the executors. Parsed once at start; nothing here is read from the environment.

use std::sync::Arc;

use reqwest::dns::Resolve;

use super::cpu::MemoryBudget;
use super::egress::{EgressPolicy, OriginLimit};
use super::email::SmtpSettings;
use super::image::ObjectStoreSettings;
use super::webhook::WebhookMasters;

/// Everything the built-in executors need to know. The default calls public addresses, sends no mail and stores nothing.
#[derive(Clone, Default)]
pub struct KindSettings {
    pub egress: EgressPolicy,
    /// Of one namespace, at one origin, in this process.
    pub origin_limit: OriginLimit,
    /// Without it `send_email` waits for it, with a passing `NotConfigured`.
    pub smtp: Option<SmtpSettings>,
    /// Without it `resize_image` waits for it, with a passing `NotConfigured`.
    pub object_store: Option<ObjectStoreSettings>,
    /// Without any, webhooks go out unsigned.
    pub webhook_masters: WebhookMasters,
    /// Shared by all kinds that work in memory.
    pub memory_budget: MemoryBudget,
    /// PEM certificates trusted beside the system's for URLs from payloads and for SMTP.
    pub extra_roots: Option<Vec<u8>>,
    /// Replaces the system's resolver for URLs from payloads: tests need it, installs don't.
    pub resolver: Option<Arc<dyn Resolve>>,
}

/// A setting that can't be used: one line for the person who set it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SettingsError(String);

impl SettingsError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}
