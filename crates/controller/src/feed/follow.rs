//! Keeps one [`Feed`] true: list, watch, resume, list again. It never ends by itself; whoever spawned it drops it.

use std::{collections::BTreeMap, time::Duration};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use futures::{StreamExt, TryStreamExt};
use kube::{
    Api, Error,
    api::{DynamicObject, ListParams, WatchEvent, WatchParams},
};
use tokio::time::Instant;

use super::{Feed, Trust, identity};
use crate::trouble;

/// Objects a page: a list of 5,000 Nodes is 10 answers of a few MB, not one of 50.
const PAGE: u32 = 500;
/// More objects of one kind are not taken: a hostile API server could go on for ever, and memory is shared by all members.
const MAX_OBJECTS: usize = 50_000;
/// Nor more pages, however little is in each.
const MAX_PAGES: usize = 4 * MAX_OBJECTS / PAGE as usize;
/// For a page of a list, and for the start of a watch.
const REQUEST: Duration = Duration::from_secs(30);
/// After this the API server ends a watch itself (seconds), and it is resumed.
const WATCH_SECONDS: u32 = 290;
/// Without an event for this long the connection is dead: the server's own end never came.
const IDLE: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 15);
/// A watch that stood for this long was no failure; only such a one shortens the next pause again.
const STANDING: Duration = Duration::from_secs(20);
/// How often a kind that is not there is asked for again.
const ABSENT: Duration = Duration::from_secs(3);

/// What to follow.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// The kind, in one namespace or in all.
    pub(crate) api: Api<DynamicObject>,
    /// What it is called in messages: `nodes`, `secrets in namespace x`.
    pub(crate) what: String,
    /// Whose it is, in logs.
    pub(crate) whose: String,
    /// Label selector, empty = all.
    pub(crate) labels: String,
    /// Field selector, empty = all.
    pub(crate) fields: String,
}

/// Keeps `feed` true. Never returns.
pub(crate) async fn follow<V: Clone + PartialEq>(source: &Source, feed: &Feed<V>) {
    let mut pause = pauses();
    loop {
        let failed = match list(source, feed).await {
            Ok(version) => watch(source, feed, version, &mut pause).await,
            Err(failed) => failed,
        };
        let wait = report(source, feed, &failed).unwrap_or_else(|| pause.next().unwrap_or(Duration::from_secs(30)));
        tokio::time::sleep(wait).await;
    }
}

/// Half a second, doubling to half a minute, each with jitter; for ever.
fn pauses() -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(500))
        .with_max_delay(Duration::from_secs(30))
        .with_jitter()
        .without_max_times()
        .build()
}

#[derive(Debug)]
enum Failed {
    /// The version to resume from is too old: list again, after a pause too, since a server may say so for ever.
    Expired,
    /// There is more than is taken.
    TooMany,
    Api(Error),
    TimedOut,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        match error {
            Error::Api(status) if status.code == 410 => Self::Expired,
            error => Self::Api(error),
        }
    }
}

/// Notes the failure in the feed; a fixed pause where there is one.
fn report<V: Clone + PartialEq>(source: &Source, feed: &Feed<V>, failed: &Failed) -> Option<Duration> {
    let what = &source.what;
    let (trust, pause) = match failed {
        Failed::Expired => return None,
        Failed::TooMany => (
            Trust::Broken(format!(
                "its API server lists more than {MAX_OBJECTS} {what}, or more than {MAX_PAGES} pages of them"
            )),
            None,
        ),
        Failed::TimedOut => (Trust::Broken(trouble::SILENT.to_owned()), None),
        Failed::Api(Error::Api(status)) if status.code == 404 => (Trust::Absent, Some(ABSENT)),
        Failed::Api(Error::Api(status)) if status.code == 403 => (
            Trust::Denied(format!("the account may not list and watch {what} (403)")),
            None,
        ),
        Failed::Api(error) => {
            tracing::debug!(what, error = error as &dyn std::error::Error, "list or watch failed");
            (Trust::Broken(trouble::words(error)), None)
        }
    };
    if feed.set_trust(trust.clone()) {
        tracing::info!(what, whose = source.whose, state = ?trust, "no longer followed; asking again");
    }
    pause
}

/// Lists everything, page by page; the version to watch from.
async fn list<V: Clone + PartialEq>(source: &Source, feed: &Feed<V>) -> Result<String, Failed> {
    let mut objects = Vec::new();
    let mut params = ListParams::default().limit(PAGE);
    if !source.labels.is_empty() {
        params = params.labels(&source.labels);
    }
    if !source.fields.is_empty() {
        params = params.fields(&source.fields);
    }
    for _ in 0..MAX_PAGES {
        let page = tokio::time::timeout(REQUEST, source.api.list(&params))
            .await
            .map_err(|_| Failed::TimedOut)??;
        objects.extend(page.items.into_iter().map(|mut object| {
            object.metadata.managed_fields = None;
            object
        }));
        if objects.len() > MAX_OBJECTS {
            return Err(Failed::TooMany);
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => {
                let version = page.metadata.resource_version.unwrap_or_default();
                feed.replace(objects, &version);
                return Ok(version);
            }
        }
    }
    Err(Failed::TooMany)
}

/// Follows from `version`, resuming where it broke, until a list is needed or a failure has to be waited out.
async fn watch<V: Clone + PartialEq>(
    source: &Source,
    feed: &Feed<V>,
    mut version: String,
    pause: &mut ExponentialBackoff,
) -> Failed {
    let mut params = WatchParams::default().timeout(WATCH_SECONDS);
    if !source.labels.is_empty() {
        params = params.labels(&source.labels);
    }
    if !source.fields.is_empty() {
        params = params.fields(&source.fields);
    }
    loop {
        let failed = match tokio::time::timeout(REQUEST, source.api.watch(&params, &version)).await {
            Ok(Ok(stream)) => {
                feed.set_trust(Trust::Live);
                let began = Instant::now();
                let ended = events(feed, stream.boxed(), &mut version).await;
                let stood = began.elapsed() > STANDING;
                if stood {
                    *pause = pauses();
                }
                match ended {
                    Ok(()) => {
                        // A server may refuse by closing, with or without an event first: wait, do not spin.
                        if !stood {
                            tokio::time::sleep(pause.next().unwrap_or(Duration::from_secs(30))).await;
                        }
                        continue;
                    }
                    Err(failed) => failed,
                }
            }
            Ok(Err(error)) => error.into(),
            Err(_) => Failed::TimedOut,
        };
        // Without the connection the last version is still good; anything the server said asks for a new list.
        if !matches!(
            failed,
            Failed::TimedOut | Failed::Api(Error::HyperError(_) | Error::Service(_) | Error::ReadEvents(_))
        ) {
            return failed;
        }
        report(source, feed, &failed);
        tokio::time::sleep(pause.next().unwrap_or(Duration::from_secs(30))).await;
    }
}

/// Takes events until the stream ends (`Ok`) or fails.
async fn events<V: Clone + PartialEq>(
    feed: &Feed<V>,
    mut stream: futures::stream::BoxStream<'_, Result<WatchEvent<DynamicObject>, Error>>,
    version: &mut String,
) -> Result<(), Failed> {
    loop {
        let event = match tokio::time::timeout(IDLE, stream.try_next()).await {
            Err(_) => return Err(Failed::TimedOut),
            Ok(event) => event?,
        };
        match event {
            None => return Ok(()),
            Some(WatchEvent::Added(mut object) | WatchEvent::Modified(mut object)) => {
                *version = object.metadata.resource_version.clone().unwrap_or_default();
                object.metadata.managed_fields = None;
                feed.put(object);
                if feed.read(BTreeMap::len) > MAX_OBJECTS {
                    return Err(Failed::TooMany);
                }
            }
            Some(WatchEvent::Deleted(object)) => {
                *version = object.metadata.resource_version.clone().unwrap_or_default();
                feed.remove(&identity(&object.metadata).0);
            }
            Some(WatchEvent::Bookmark(mark)) => *version = mark.metadata.resource_version,
            Some(WatchEvent::Error(status)) => return Err(Error::Api(status).into()),
        }
    }
}

#[cfg(test)]
mod tests;
