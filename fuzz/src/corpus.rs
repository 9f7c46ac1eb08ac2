//! Runs the fuzz targets as tests, with every input in fuzz/corpus and a few thousand mutations of these inputs. After a
//! panic the input is printed. `FUZZ_SEED=N` selects other mutations, and the same seed always gives the same ones.
//! `FUZZ_ROUNDS=N` sets the number of mutations.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::Path,
};

use serde_json::Value;

use crate::{objects, packets};

/// Number of mutations for a target that needs no handshake.
const ROUNDS: u64 = 4_000;
/// Number of mutations for a target that begins with a handshake, which is slow.
const SESSION_ROUNDS: u64 = 1_000;
/// Tokens that often break parsers.
const TOKENS: [&[u8]; 16] = [
    b"0.0.0.0/0",
    b"::/0",
    b"/33",
    b"-1",
    b"0",
    b"65536",
    b"18446744073709551616",
    b"1e400",
    b"null",
    b"[]",
    b"{}",
    b"\"",
    b"\xc3\xa9",
    b"::ffff:10.0.0.1",
    b"%eth0",
    b"\\u0000",
];

/// The generator xorshift64, with the same results on every machine.
struct Random(u64);

impl Random {
    /// The next number, less than `bound`.
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound.max(1) as u64) as usize
    }

    /// Mutates values of a JSON document of the corpus, because mutated bytes would hardly ever be valid JSON. `None` = a chosen
    /// input is not JSON, or has no value to mutate.
    fn mutate_json(&mut self, corpus: &[Vec<u8>]) -> Option<Vec<u8>> {
        let parse_any = |random: &mut Self| serde_json::from_slice::<Value>(&corpus[random.below(corpus.len())]).ok();
        let mut value = parse_any(self)?;
        for _ in 0..=self.below(3) {
            let mut other = parse_any(self)?;
            let (at, from) = (self.below(count_leaves(&value)), self.below(count_leaves(&other)));
            let token = String::from_utf8_lossy(TOKENS[self.below(TOKENS.len())]);
            let chosen = leaf(&mut value, &mut { at })?;
            *chosen = match self.below(4) {
                0 => token.into(),
                1 => self.below(70_000).into(),
                2 => chosen
                    .as_str()
                    .map_or(Value::Null, |text| format!("{text}{token}").into()),
                _ => leaf(&mut other, &mut { from })?.take(),
            };
        }
        serde_json::to_vec(&value).ok()
    }

    /// Mutates one input: mostly the values of its JSON, else its bytes. Some changes insert parts of other inputs.
    fn mutate(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        if self.below(4) > 0
            && let Some(changed) = self.mutate_json(corpus)
        {
            return changed;
        }
        let mut bytes = corpus[self.below(corpus.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len() + 1);
            let end = (at + self.below(24)).min(bytes.len());
            match self.below(6) {
                0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                1 if at < bytes.len() => bytes[at] = self.below(256) as u8,
                2 => drop(bytes.drain(at..end)),
                3 => drop(bytes.splice(at..end, TOKENS[self.below(TOKENS.len())].iter().copied())),
                4 => {
                    let other = &corpus[self.below(corpus.len())];
                    let from = self.below(other.len());
                    let piece = &other[from..(from + self.below(64)).min(other.len())];
                    drop(bytes.splice(at..at, piece.iter().copied()));
                }
                _ => bytes.truncate(bytes.len() - bytes.len() / 8 * self.below(2)),
            }
        }
        bytes
    }
}

/// The number of leaf values in a JSON document.
fn count_leaves(value: &Value) -> usize {
    match value {
        Value::Array(values) => values.iter().map(count_leaves).sum(),
        Value::Object(fields) => fields.values().map(count_leaves).sum(),
        _ => 1,
    }
}

/// The n-th leaf value, counted from 0. The search decreases `n` by one for each leaf before it.
fn leaf<'v>(value: &'v mut Value, n: &mut usize) -> Option<&'v mut Value> {
    match value {
        Value::Array(values) => values.iter_mut().find_map(|value| leaf(value, n)),
        Value::Object(fields) => fields.values_mut().find_map(|value| leaf(value, n)),
        _ if *n == 0 => Some(value),
        _ => {
            *n -= 1;
            None
        }
    }
}

/// The number in an environment variable.
fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect(variable))
}

/// Runs a fuzz target. `body` returns whether its input was useful, that is, valid enough to be processed and not only refused. At
/// least `minimum_percent` percent of the mutations must be useful; otherwise the run would test almost nothing.
fn run_target(target: &str, rounds: u64, minimum_percent: u64, body: fn(&[u8]) -> bool) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let mut files: Vec<_> = fs::read_dir(&directory)
        .expect("a corpus")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).expect("an input")).collect();
    assert!(!corpus.is_empty(), "{} is empty", directory.display());
    let attempt = |bytes: &[u8], origin: &dyn Fn() -> String| {
        catch_unwind(AssertUnwindSafe(|| body(bytes))).unwrap_or_else(|panic| {
            println!("{target}, {}: {:?}", origin(), String::from_utf8_lossy(bytes));
            println!("the same input as bytes: {bytes:?}");
            resume_unwind(panic)
        })
    };
    for (file, bytes) in files.iter().zip(&corpus) {
        attempt(bytes, &|| file.display().to_string());
    }
    let seed = number("FUZZ_SEED", 0x9e37_79b9_7f4a_7c15);
    let mut random = Random(seed.max(1));
    let rounds = number("FUZZ_ROUNDS", rounds);
    let mut useful = 0;
    for round in 0..rounds {
        useful += u64::from(attempt(&random.mutate(&corpus), &|| {
            format!("seed {seed}, round {round}")
        }));
    }
    println!("{target}: {useful} of {rounds} inputs were useful");
    assert!(
        useful * 100 >= minimum_percent * rounds,
        "{useful} of {rounds} inputs were useful"
    );
}

// threat: hostile-object
#[test]
fn mutated_objects_are_refused_or_read_as_written() {
    run_target("object", ROUNDS, 40, objects::object);
}

// threat: hostile-object
#[test]
fn mutated_annotations_never_panic_or_give_invalid_hosts() {
    run_target("annotation", ROUNDS, 5, objects::annotation);
}

// threat: hostile-object
#[test]
fn mutated_peers_and_policies_compile_to_a_safe_node_state() {
    run_target("compiled", ROUNDS, 30, objects::compiled);
}

// threat: crafted-offload
#[test]
fn mutated_offload_headers_split_into_bounded_segments() {
    run_target("superpacket", ROUNDS, 40, packets::superpacket);
}

// threat: crafted-offload
#[test]
fn coalesced_packets_are_split_into_the_same_packets() {
    run_target("inner", ROUNDS, 25, packets::inner);
}

// threat: icmp-error-abuse
#[test]
fn icmp_errors_are_valid_small_and_cause_no_further_error() {
    run_target("unreachable", ROUNDS, 50, packets::unreachable);
}

// threat: replayed-message
#[test]
fn session_delivers_only_sent_packets_each_at_most_once() {
    run_target("datagram", SESSION_ROUNDS, 35, packets::datagram);
}
