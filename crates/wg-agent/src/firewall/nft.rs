//! The table in the kernel, through the program `nft`: a script on its standard input, JSON from its output. No argument
//! or environment of it ever holds data from an object.

use std::{ffi::OsString, os::unix::process::ExitStatusExt, path::PathBuf, process::Stdio, time::Duration};

use clustermesh_agent_core::numbers::NFT_TABLE;
use serde_json::Value;
use tokio::{io::AsyncWriteExt, process::Command};

use super::{
    Backend, Error, Listing,
    generation::{self, Generation},
};

/// Far more than any transaction took: 1,000 prefixes are 12 ms.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The nftables of the network namespace in which its methods are called.
#[derive(Debug, Clone)]
pub struct Nft {
    program: PathBuf,
    /// What our table was, and when.
    listed: Option<(Generation, Option<Listing>)>,
}

impl Default for Nft {
    /// `nft` from PATH.
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

    /// Runs it to its end: its output, or what it said on standard error.
    async fn call(&self, arguments: &[&str], script: Option<&str>) -> Result<Result<Vec<u8>, String>, Error> {
        let start = |source| Error::Start {
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
            .map_err(start)?;
        let stdin = child.stdin.take();
        let feed = async move {
            if let (Some(mut stdin), Some(script)) = (stdin, script) {
                // It stops reading at the first mistake; what it says about that is the better error.
                let _ = stdin.write_all(script.as_bytes()).await;
            }
        };
        let both = async { tokio::join!(feed, child.wait_with_output()).1 };
        let output = tokio::time::timeout(TIMEOUT, both)
            .await
            .map_err(|_| Error::Timeout(TIMEOUT.as_secs()))?
            .map_err(start)?;
        if output.status.success() {
            return Ok(Ok(output.stdout));
        }
        if let Some(signal) = output.status.signal() {
            return Err(Error::Killed(signal));
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok(Err(said
            .lines()
            .take(6)
            .map(|line| line.chars().take(200).collect::<String>())
            .collect::<Vec<_>>()
            .join("\n")))
    }

    async fn list(&self) -> Result<Option<Listing>, Error> {
        match self.call(&["-j", "list", "table", "inet", NFT_TABLE], None).await? {
            Ok(text) => parse(&text).map(Some),
            // nft names an absent table by ENOENT's text and nothing else; a missing kernel module reads the same, and
            // then the write that follows says so.
            Err(said) if said.contains("No such file or directory") => Ok(None),
            Err(stderr) => Err(Error::Refused {
                what: "to list our table",
                stderr,
            }),
        }
    }
}

impl Backend for Nft {
    async fn observe(&mut self) -> Result<Option<Listing>, Error> {
        // A kernel that does not tell is asked for a listing each time.
        let before = generation::now().ok();
        match &self.listed {
            Some((at, listing)) if before == Some(*at) => return Ok(listing.clone()),
            _ => {}
        }
        let listing = self.list().await?;
        // Of a transaction in between nobody says whether it was seen.
        let still = before.filter(|before| generation::now().ok() == Some(*before));
        self.listed = still.map(|at| (at, listing.clone()));
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
        // `delete` alone fails where there is none, and `destroy` is not known to nft 1.0.6.
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

/// Takes away what means nothing or changes by itself: numbers of handles, counts of packets, what is left of an element's
/// time, the order of elements.
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
