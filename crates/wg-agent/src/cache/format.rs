//! Defines the format of the cache: two lines of JSON, the header and the values.
//!
//! The types of the fields of [`Body`] are part of the format, so a change of one of them needs a new [`VERSION`]. A test compares
//! the written cache with the golden file of the version. After such a change the test fails until the version is raised and its
//! golden file is written.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{CacheContent, LiveEndpoints, SavedObjects, UnixTime};

/// The format's name in the header.
const FORMAT: &str = "clustermesh wg-agent cache";
/// The format version; a file of another version is not read.
pub(super) const VERSION: u32 = 6;

/// Why a file is not used. The agent renames such a file to `*.damaged`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unusable {
    /// Truncated, changed, or not written by an agent.
    #[error("it is damaged ({0})")]
    Damaged(String),
    /// Another format version.
    #[error("another version of wg-agent wrote it: it has format version {0}, and this agent reads version {VERSION}")]
    Version(u32),
    /// Written for another node.
    #[error("it was written for node {0:?}")]
    OtherNode(String),
    /// The last confirmation by the API server is too long ago.
    #[error(
        "the API server confirmed it last at {0}, which is longer ago than --cache-max-age ({1:#}): Peers that were deleted since \
         would come back"
    )]
    Old(UnixTime, jiff::SignedDuration),
    /// Other users could read or write the file.
    #[error("others could read or change it ({0})")]
    Exposed(String),
}

/// The first line. A header of another version may lack `node` and `sha256`. With their defaults it still parses, so the error is
/// [`Unusable::Version`].
#[derive(Serialize, Deserialize)]
struct Head {
    format: String,
    version: u32,
    #[serde(default)]
    node: String,
    #[serde(default)]
    sha256: String,
}

/// The second line. It is written from borrowed values and read into owned ones.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Body<'a> {
    saved: Cow<'a, SavedObjects>,
    live: Cow<'a, LiveEndpoints>,
    confirmed: UnixTime,
}

/// The values in a cache file.
pub(super) struct Values {
    pub(super) saved: SavedObjects,
    pub(super) live: LiveEndpoints,
    pub(super) confirmed: UnixTime,
}

/// Encodes the content for this node.
pub(super) fn write(node: &str, content: &CacheContent) -> Result<String, serde_json::Error> {
    let CacheContent { saved, confirmed, live } = content;
    let body = serde_json::to_string(&Body {
        saved: saved.as_deref().map_or_else(Cow::default, Cow::Borrowed),
        live: Cow::Borrowed(live),
        confirmed: *confirmed,
    })?;
    let head = serde_json::to_string(&Head {
        format: FORMAT.to_owned(),
        version: VERSION,
        node: node.to_owned(),
        sha256: hash(&body),
    })?;
    Ok(format!("{head}\n{body}\n"))
}

/// Decodes a file that was written for this node.
pub(super) fn read(node: &str, text: &str) -> Result<Values, Unusable> {
    let damaged = |why: &dyn std::fmt::Display| Unusable::Damaged(why.to_string());
    let (head, body) = text.split_once('\n').ok_or_else(|| damaged(&"it is cut off"))?;
    let head: Head = serde_json::from_str(head).map_err(|e| damaged(&e))?;
    if head.format != FORMAT {
        return Err(damaged(&"it is not a cache of wg-agent"));
    }
    if head.version != VERSION {
        return Err(Unusable::Version(head.version));
    }
    if head.node != node {
        return Err(Unusable::OtherNode(head.node));
    }
    let body = body.trim_end_matches('\n');
    if hash(body) != head.sha256 {
        return Err(damaged(&"its checksum does not match"));
    }
    let Body { saved, live, confirmed } = serde_json::from_str(body).map_err(|e| damaged(&e))?;
    Ok(Values {
        saved: saved.into_owned(),
        live: live.into_owned(),
        confirmed,
    })
}

fn hash(text: &str) -> String {
    let sum = Sha256::digest(text.as_bytes());
    sum.iter().map(|byte| format!("{byte:02x}")).collect()
}
