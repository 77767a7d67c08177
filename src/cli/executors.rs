//! The settings of the built-in executors, and the registry made of them.

use std::path::PathBuf;

use clap::Args;

use super::settings::named;
use super::values::{self, Secret};
use crate::kinds::egress::{EgressPolicy, OriginLimit};
use crate::kinds::email::SmtpSettings;
use crate::kinds::image::ObjectStoreSettings;
use crate::kinds::webhook::WebhookMasters;
use crate::kinds::{KindSettings, MemoryBudget, Registry};

#[derive(Args)]
#[command(next_help_heading = "What jobs may do")]
pub(super) struct ExecutorArgs {
    /// The mail server: smtps://user:password@host, smtp://host?tls=required; without it mails wait
    #[arg(long, env = "JOBREQUEST_SMTP_URL", hide_env_values = true, value_name = "URL")]
    smtp_url: Option<Secret>,
    /// The sender of all mail: an address, with a display name if wanted
    #[arg(long, env = "JOBREQUEST_SMTP_FROM", hide_env_values = true, value_name = "ADDRESS")]
    smtp_from: Option<String>,
    /// Allow mail without TLS to a server that is not on loopback
    #[arg(long, env = "JOBREQUEST_SMTP_ALLOW_PLAINTEXT", hide_env_values = true, value_name = "BOOL")]
    #[arg(default_value = "false", action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    smtp_allow_plaintext: bool,
    /// CIDRs of non-public addresses that URLs in payloads may reach, by commas
    #[arg(long, env = "JOBREQUEST_EGRESS_ALLOW", hide_env_values = true, value_name = "CIDRS", default_value = "")]
    #[arg(hide_default_value = true)]
    egress_allow: String,
    /// CIDRs that URLs in payloads may never reach, by commas; wins
    #[arg(long, env = "JOBREQUEST_EGRESS_DENY", hide_env_values = true, value_name = "CIDRS", default_value = "")]
    #[arg(hide_default_value = true)]
    egress_deny: String,
    /// How many jobs of one namespace a worker lets call one origin (scheme, host, port) at once, up to 1024; the others
    /// are handed back at no cost and come again
    #[arg(long, env = "JOBREQUEST_ORIGIN_CONCURRENCY", hide_env_values = true, value_name = "CALLS")]
    #[arg(default_value = "8", value_parser = values::origin_limit)]
    origin_concurrency: OriginLimit,
    /// Where pictures go: s3://bucket/prefix, gs://…, az://…, file:///directory. The store's own variables (AWS_…,
    /// GOOGLE_…, AZURE_…) are read too. If unset, a directory: $XDG_DATA_HOME/jobrequest/objects,
    /// ~/.local/share/jobrequest/objects, or jobrequest/objects in the directory for temporary files
    #[arg(long, env = "JOBREQUEST_OBJECT_STORE_URL", hide_env_values = true, value_name = "URL")]
    object_store_url: Option<Secret>,
    /// The master of which each receiver's whsec_ secret is made (jobrequest jobs webhook-secret), at least 16
    /// characters; during a change of masters the new one and the old one, by a comma. If unset, webhooks go unsigned
    #[arg(long, env = "JOBREQUEST_WEBHOOK_SECRET", hide_env_values = true, value_name = "SECRET")]
    webhook_secret: Option<Secret>,
    /// Memory, in MiB, that resize_image and summarize_text may take all together; leave the rest of the process 128 more.
    /// A picture that never fits is refused, one that doesn't fit now waits.
    #[arg(long, env = "JOBREQUEST_MEMORY_BUDGET_MIB", hide_env_values = true, value_name = "MIB")]
    #[arg(default_value = "384", value_parser = values::memory_budget)]
    memory_budget_mib: MemoryBudget,
    /// A file of PEM certificates to be trusted beside the system's
    #[arg(long, env = "JOBREQUEST_EXTRA_CA_FILE", hide_env_values = true, value_name = "FILE")]
    extra_ca_file: Option<PathBuf>,
}

impl ExecutorArgs {
    pub(super) fn registry(self) -> Result<Registry, String> {
        let Self {
            smtp_url,
            smtp_from,
            smtp_allow_plaintext,
            egress_allow,
            egress_deny,
            origin_concurrency: origin_limit,
            object_store_url,
            webhook_secret,
            memory_budget_mib: memory_budget,
            extra_ca_file,
        } = self;
        let egress = EgressPolicy {
            allow: EgressPolicy::parse(&egress_allow, "")
                .map_err(named("JOBREQUEST_EGRESS_ALLOW", "--egress-allow"))?
                .allow,
            deny: EgressPolicy::parse("", &egress_deny).map_err(named("JOBREQUEST_EGRESS_DENY", "--egress-deny"))?.deny,
        };
        let smtp = match (smtp_url, smtp_from) {
            (None, _) => None,
            (Some(_), None) => {
                return Err(
                    "JOBREQUEST_SMTP_URL (--smtp-url) needs JOBREQUEST_SMTP_FROM: the sender of all mail".into()
                );
            }
            (Some(Secret(url)), Some(from)) => {
                let smtp = SmtpSettings::parse(&url, &from, smtp_allow_plaintext);
                Some(smtp.map_err(|error| named("JOBREQUEST_SMTP_URL", "--smtp-url")(error.to_string()))?)
            }
        };
        let object_store = object_store(object_store_url)?;
        let webhook_masters = match webhook_secret {
            Some(Secret(text)) => webhook_masters(&text)?,
            None => WebhookMasters::default(),
        };
        let extra_roots = extra_ca_file
            .map(|file| std::fs::read(&file).map_err(|error| format!("{}: {error}", file.display())))
            .transpose()
            .map_err(named("JOBREQUEST_EXTRA_CA_FILE", "--extra-ca-file"))?;
        let settings = KindSettings {
            egress,
            origin_limit,
            smtp,
            object_store,
            webhook_masters,
            memory_budget,
            extra_roots,
            resolver: None,
        };
        Registry::builtin(&settings).map_err(|error| error.to_string())
    }
}

pub(super) fn webhook_masters(text: &str) -> Result<WebhookMasters, String> {
    WebhookMasters::parse(text)
        .map_err(|error| named("JOBREQUEST_WEBHOOK_SECRET", "--webhook-secret")(error.to_string()))
}

/// The default directory need not be there for a worker that makes no pictures; one that was asked for must.
fn object_store(url: Option<Secret>) -> Result<Option<ObjectStoreSettings>, String> {
    let Some(Secret(url)) = url else {
        let directory = url::Url::from_directory_path(data_directory().join("objects")).ok();
        return Ok(directory.and_then(|url| ObjectStoreSettings::parse(url.as_str(), []).ok()));
    };
    let of_a_store = |name: &str| ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|prefix| name.starts_with(prefix));
    let options = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| of_a_store(name));
    ObjectStoreSettings::parse(&url, options)
        .map(Some)
        .map_err(|error| named("JOBREQUEST_OBJECT_STORE_URL", "--object-store-url")(error.to_string()))
}

fn data_directory() -> PathBuf {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_DATA_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/share")))
        .filter(|directory| std::fs::create_dir_all(directory.join("jobrequest/objects")).is_ok())
        .unwrap_or_else(std::env::temp_dir)
        .join("jobrequest")
}
