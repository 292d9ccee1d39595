//! Sends alerts about attempts to escape to the operator's webhook: signed, with retries, at least
//! once.

use std::{sync::Arc, time::Duration};

use codelia_policy::EscapeOptions;
use codelia_store::{Alert, Store, read_private};
use codelia_telemetry::metrics;
use codelia_types::option::InvalidOption;
use reqwest::{Client, redirect};
use ring::hmac;
use time::OffsetDateTime;
use tokio::time::sleep;

/// Between two looks for alerts.
const INTERVAL: Duration = Duration::from_secs(1);
/// Alerts that are taken at once.
const BATCH: i64 = 16;
/// For one request, its answer included.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Until the second attempt; longer than a request. It doubles with each attempt.
const RETRY_DELAY: Duration = Duration::from_secs(15);
/// Then an alert is given up, after more than an hour. Its event stays.
const MAX_ATTEMPTS: i32 = 9;

/// Shorter secrets can be guessed.
const MIN_SECRET: usize = 16;

/// Where alerts are sent.
#[derive(Clone)]
pub struct Webhook {
    /// The address, `https` or `http`.
    pub url: String,
    /// Signs alerts.
    pub secret: Arc<[u8]>,
}

impl Webhook {
    /// The configured webhook, with its secret from its file; `None` if there is none.
    ///
    /// # Errors
    /// If the address or the secret is not one.
    pub fn read(options: &EscapeOptions) -> Result<Option<Self>, InvalidOption> {
        let Some(url) = options.webhook_url() else { return Ok(None) };
        if !url.starts_with("https://") && !url.starts_with("http://") {
            return Err(InvalidOption::new(
                "escape.webhook_url",
                "must start with https:// or http://",
            ));
        }
        let refused = |message: String| InvalidOption::new("escape.webhook_secret_file", message);
        let required = || refused("required with escape.webhook_url".to_owned());
        let file = options.webhook_secret_file.as_deref().ok_or_else(required)?;
        let text =
            read_private(file).map_err(|error| refused(format!("{}: {error}", file.display())))?;
        let secret = text.trim().as_bytes();
        if secret.len() < MIN_SECRET {
            return Err(refused(format!("needs at least {MIN_SECRET} bytes")));
        }
        Ok(Some(Self { url: url.to_owned(), secret: secret.into() }))
    }
}

impl std::fmt::Debug for Webhook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Webhook").finish_non_exhaustive()
    }
}

/// Sends alerts for as long as the api runs. Each api does; an alert is taken by one at a time.
/// Ends only if it cannot send any.
pub(crate) async fn send(webhook: Webhook, store: Store) {
    let Ok(client) = client() else { return };
    loop {
        sleep(INTERVAL).await;
        let taken = match store.alert_take_any_tenant(BATCH, RETRY_DELAY).await {
            Ok(taken) => taken,
            Err(error) => {
                tracing::warn!(%error, "cannot read alerts");
                continue;
            }
        };
        for alert in taken {
            deliver(&client, &webhook, &store, alert).await;
        }
    }
}

fn client() -> Result<Client, reqwest::Error> {
    // Fails if one is installed already, which is the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let built =
        Client::builder().timeout(TIMEOUT).redirect(redirect::Policy::none()).no_proxy().build();
    if let Err(error) = &built {
        tracing::error!(%error, "alerts cannot be sent");
    }
    built
}

/// Sends an alert, and removes it unless it is to be tried again.
async fn deliver(client: &Client, webhook: &Webhook, store: &Store, alert: Alert) {
    let sent = post(client, webhook, &alert).await;
    match &sent {
        Ok(()) => {}
        Err(problem) if alert.attempts < MAX_ATTEMPTS => {
            tracing::warn!(event = %alert.id, attempt = alert.attempts, problem, "cannot send alert, retrying");
            return;
        }
        Err(problem) => tracing::error!(event = %alert.id, problem, "alert given up"),
    }
    metrics().escape.alert(if sent.is_ok() { "sent" } else { "dropped" });
    if let Err(error) = store.alert_remove_any_tenant(alert.id).await {
        tracing::warn!(event = %alert.id, %error, "alert sent, but not removed: it is sent again");
    }
}

async fn post(client: &Client, webhook: &Webhook, alert: &Alert) -> Result<(), String> {
    let body = alert.body.to_string();
    let at = OffsetDateTime::now_utc().unix_timestamp();
    let request = client
        .post(&webhook.url)
        .header("content-type", "application/json")
        .header("codelia-timestamp", at)
        .header("codelia-signature", signature(&webhook.secret, at, &body))
        .body(body);
    // The address may have a secret in it.
    let answer = request.send().await.map_err(|error| error.without_url().to_string())?;
    if answer.status().is_success() { Ok(()) } else { Err(format!("answered {}", answer.status())) }
}

/// HMAC-SHA256 of the time, a dot and the body, so that an old alert is not taken for a new one.
fn signature(secret: &[u8], at: i64, body: &str) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    let tag = hmac::sign(&key, format!("{at}.{body}").as_bytes());
    format!("sha256={}", hex::encode(tag))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `printf '1700000000.{"a":1}' | openssl dgst -sha256 -hmac key` prints it.
    #[test]
    fn signature_covers_time_and_body() {
        let signed = signature(b"key", 1_700_000_000, r#"{"a":1}"#);
        assert_eq!(
            signed,
            "sha256=a438e398bfafc57e4396bb7fc2304422f0f768e965d073ca313cb52e22e6ad03"
        );
        assert_ne!(signed, signature(b"key", 1_700_000_001, r#"{"a":1}"#));
        assert_ne!(signed, signature(b"other", 1_700_000_000, r#"{"a":1}"#));
    }
}
