//! The responses to attempts to leave a sandbox, and the webhook for alerts.

use anyhow::{Context, Result, ensure};
use codelia_api::Webhook;
use codelia_policy::{EscapeOptions, EscapeResponse};
use secrecy::ExposeSecret;

use super::secrets::read_private;
use crate::config::Config;

/// Shorter secrets can be guessed.
const MIN_SECRET: usize = 16;

/// The responses by severity.
pub(crate) fn responses(config: &Config) -> Result<EscapeOptions> {
    let escape = &config.escape;
    let parse =
        |key: &str, text: &str| text.parse::<EscapeResponse>().with_context(|| format!("escape.{key}"));
    Ok(EscapeOptions {
        low: parse("low", &escape.low)?,
        high: parse("high", &escape.high)?,
        critical: parse("critical", &escape.critical)?,
        hostile: parse("hostile", &escape.hostile)?,
        webhook: webhook_url(config).is_some(),
    })
}

fn webhook_url(config: &Config) -> Option<&str> {
    config.escape.webhook_url.as_ref().map(ExposeSecret::expose_secret).filter(|url| !url.is_empty())
}

/// The webhook, if one is configured.
pub(crate) fn webhook(config: &Config) -> Result<Option<Webhook>> {
    let Some(url) = webhook_url(config) else { return Ok(None) };
    ensure!(
        url.starts_with("https://") || url.starts_with("http://"),
        "escape.webhook_url: must start with https:// or http://"
    );
    let file = config.escape.webhook_secret_file.as_ref();
    let file = file.context("escape.webhook_secret_file: required with escape.webhook_url")?;
    let secret =
        read_private(file).with_context(|| format!("escape.webhook_secret_file: {}", file.display()))?;
    let secret = secret.trim().as_bytes();
    ensure!(secret.len() >= MIN_SECRET, "escape.webhook_secret_file: needs at least {MIN_SECRET} bytes");
    Ok(Some(Webhook { url: url.to_owned(), secret: secret.into() }))
}
