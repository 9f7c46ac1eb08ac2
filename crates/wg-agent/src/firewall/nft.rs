//! Implements [`Backend`] with the program `nft`: it reads a script from standard input and prints a table as JSON. Its
//! arguments and environment never contain data from a Kubernetes object.

use std::{ffi::OsString, os::unix::process::ExitStatusExt, path::PathBuf, process::Stdio, time::Duration};

use clustermesh_agent_core::numbers::NFT_TABLE;
use serde_json::Value;
use tokio::{io::AsyncWriteExt, process::Command};

use super::{
    Backend, Error, Listing,
    generation::{self, Generation},
};

/// Far more than a transaction takes: one with 1,000 prefixes takes 12 ms.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The nftables of the network namespace of the thread that calls its methods.
#[derive(Debug, Clone)]
pub struct Nft {
    program: PathBuf,
    /// The last listing, with its ruleset generation. The inner `None` = there is no table; the outer `None` = `observe` has to list it
    /// again.
    listed: Option<(Generation, Option<Listing>)>,
}

impl Default for Nft {
    /// Uses `nft` from PATH.
    fn default() -> Self {
        Self::new("nft")
    }
}

impl Nft {
    /// Uses this program.
    pub fn new(program: impl Into<OsString>) -> Self {
        Self {
            program: PathBuf::from(program.into()),
            listed: None,
        }
    }

    /// Runs nft. Returns its standard output, or the first lines of its standard error if it fails.
    async fn call(&self, arguments: &[&str], script: Option<&str>) -> Result<Result<Vec<u8>, String>, Error> {
        // A rare error while waiting for nft is reported as a start error, too.
        let start_error = |source| Error::Start {
            program: self.program.clone(),
            source,
        };
        let mut child = Command::new(&self.program)
            .args(arguments)
            .env("LC_ALL", "C")
            .stdin(if script.is_some() {
                Stdio::piped()
            } else {
                Stdio::null()
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(start_error)?;
        let stdin = child.stdin.take();
        let feed = async move {
            if let (Some(mut stdin), Some(script)) = (stdin, script) {
                // nft may exit before it has read the whole script. Its own error message is better than EPIPE.
                let _ = stdin.write_all(script.as_bytes()).await;
            }
        };
        let both = async { tokio::join!(feed, child.wait_with_output()).1 };
        let output = tokio::time::timeout(TIMEOUT, both)
            .await
            .map_err(|_| Error::Timeout(TIMEOUT.as_secs()))?
            .map_err(start_error)?;
        if output.status.success() {
            return Ok(Ok(output.stdout));
        }
        if let Some(signal) = output.status.signal() {
            return Err(Error::Killed(signal));
        }
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok(Err(stderr
            .lines()
            .take(6)
            .map(|line| line.chars().take(200).collect::<String>())
            .collect::<Vec<_>>()
            .join("\n")))
    }

    async fn list(&self) -> Result<Option<Listing>, Error> {
        match self.call(&["-j", "list", "table", "inet", NFT_TABLE], None).await? {
            Ok(text) => parse(&text).map(Some),
            // nft reports a missing table only by the text of ENOENT. The text is the same if a kernel module is missing;
            // then the following write fails and reports it.
            Err(stderr) if stderr.contains("No such file or directory") => Ok(None),
            Err(stderr) => Err(Error::Refused {
                what: "to list the agent's table",
                stderr,
            }),
        }
    }
}

impl Backend for Nft {
    async fn observe(&mut self) -> Result<Option<Listing>, Error> {
        // If the generation cannot be read, the table is listed each time.
        let before = generation::current().ok();
        match &self.listed {
            Some((generation, listing)) if before == Some(*generation) => return Ok(listing.clone()),
            _ => {}
        }
        let listing = self.list().await?;
        // If the generation changed meanwhile, it is unknown whether the listing contains the change.
        let stable = before.filter(|before| generation::current().ok() == Some(*before));
        self.listed = stable.map(|generation| (generation, listing.clone()));
        Ok(listing)
    }

    async fn run(&mut self, script: &str) -> Result<(), Error> {
        match self.call(&["-f", "-"], Some(script)).await? {
            Ok(_) => Ok(()),
            Err(stderr) => Err(Error::Refused {
                what: "the transaction, which changed nothing",
                stderr,
            }),
        }
    }

    async fn destroy(&mut self) -> Result<(), Error> {
        // `delete` alone fails if there is no table, and nft 1.0.6 does not know `destroy`.
        self.run(&format!("table inet {NFT_TABLE}\ndelete table inet {NFT_TABLE}\n"))
            .await
    }
}

fn parse(text: &[u8]) -> Result<Listing, Error> {
    let mut json: Value = serde_json::from_slice(text).map_err(|e| Error::Answer(e.to_string()))?;
    let Some(Value::Array(objects)) = json.get_mut("nftables").map(Value::take) else {
        return Err(Error::Answer("no list \"nftables\" in it".to_owned()));
    };
    let mut objects: Vec<Value> = objects.into_iter().filter(|o| o.get("metainfo").is_none()).collect();
    objects.iter_mut().for_each(strip);
    Ok(Listing(Value::Array(objects)))
}

/// Removes the values that the kernel sets: handles, the values of counters, and the remaining time of elements. Sorts elements, because
/// their order can change without a write.
fn strip(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.remove("handle");
            map.remove("expires");
            map.values_mut().for_each(strip);
            if let Some(counter) = map.get_mut("counter") {
                *counter = Value::Null;
            }
            if let Some(Value::Array(elements)) = map.get_mut("elem") {
                elements.sort_by_cached_key(Value::to_string);
            }
        }
        Value::Array(all) => all.iter_mut().for_each(strip),
        _ => {}
    }
}
