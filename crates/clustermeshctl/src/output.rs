//! Escapes control and invisible characters in all output of the program. Names, annotations and error messages come from clusters and must
//! not control the terminal.

use std::io::{self, Write};

/// Writes printable text and line breaks unchanged, and every other character as JSON's `\uXXXX`: control characters (escape sequences
/// begin with one), invisible characters that reorder or hide text (bidirectional overrides, zero-width characters), combining marks,
/// spaces except U+0020, and private-use and unassigned characters. JSON output keeps its meaning, because such
/// a character can only be inside a string literal there. Invalid UTF-8 becomes U+FFFD.
pub(crate) struct Printable<'a>(pub(crate) &'a mut dyn Write);

impl Printable<'_> {
    /// Clears the terminal and moves the cursor to its top.
    pub(crate) fn clear_screen(&mut self) -> io::Result<()> {
        self.0.write_all(b"\x1b[H\x1b[2J")
    }
}

impl Write for Printable<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for chunk in bytes.utf8_chunks() {
            let mut text = String::with_capacity(chunk.valid().len());
            chunk.valid().chars().for_each(|c| escape(c, &mut text));
            if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            self.0.write_all(text.as_bytes())?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn escape(c: char, text: &mut String) {
    // The standard library knows which characters are printable, but exposes it only through `escape_debug`.
    let is_printable = matches!(c, '\n' | '"' | '\'' | '\\') || c.escape_debug().eq([c]);
    if is_printable {
        text.push(c);
    } else {
        for unit in c.encode_utf16(&mut [0; 2]) {
            text.push_str(&format!("\\u{unit:04x}"));
        }
    }
}

/// Shortens text from a cluster for a message: cuts it after 300 characters and appends the length of the whole text.
pub(crate) fn shorten(text: &str) -> String {
    const MAX_CHARACTERS: usize = 300;
    match text.char_indices().nth(MAX_CHARACTERS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}... ({} bytes)", text.get(..end).unwrap_or_default(), text.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(bytes: &[u8]) -> String {
        let mut out = Vec::new();
        Printable(&mut out).write_all(bytes).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn printable_text_without_combining_marks_is_unchanged() {
        let text = "a \"quoted\" \\ 'word', ├─ →\nÄpfel, 节点, узел, עברית, ελληνικά, नड\u{2713}\n";
        assert_eq!(printed(text.as_bytes()), text);
    }

    // threat: terminal-injection
    #[test]
    fn characters_that_are_not_printable_are_escaped() {
        for (hostile, shown) in [
            ("\u{1b}[2J", "\\u001b[2J"),
            ("\u{1b}]52;c;eA==\u{7}", "\\u001b]52;c;eA==\\u0007"),
            ("a\rb\tc\u{8}\u{7f}\0", "a\\u000db\\u0009c\\u0008\\u007f\\u0000"),
            // C1: the one-character forms of ESC [ and ESC ].
            ("\u{9b}31m\u{9d}0;x\u{9c}\u{85}", "\\u009b31m\\u009d0;x\\u009c\\u0085"),
            // Bidirectional overrides, isolates and marks.
            (
                "\u{202e}gnp\u{202c}\u{2066}\u{2069}\u{200f}\u{61c}",
                "\\u202egnp\\u202c\\u2066\\u2069\\u200f\\u061c",
            ),
            // Zero-width characters: two names that look the same.
            (
                "n\u{200b}1\u{feff}\u{2060}\u{ad}\u{180e}",
                "n\\u200b1\\ufeff\\u2060\\u00ad\\u180e",
            ),
            ("\u{2028}\u{2029}\u{a0}\u{3000}", "\\u2028\\u2029\\u00a0\\u3000"),
            // Tag, private-use and unassigned characters. Above U+FFFF they become surrogate pairs, as in JSON.
            ("\u{e0041}\u{e000}\u{10ffff}", "\\udb40\\udc41\\ue000\\udbff\\udfff"),
            // Combining marks.
            ("e\u{301}\u{489}", "e\\u0301\\u0489"),
        ] {
            assert_eq!(printed(hostile.as_bytes()), shown);
        }
        assert_eq!(printed(b"a\x9b\xffb\xe2\x80"), "a\u{fffd}\u{fffd}b\u{fffd}");
    }

    #[test]
    fn escaped_json_contains_the_same_strings() {
        let value = serde_json::json!({"name": "n\u{9b}\u{202e}\u{1f}\"\u{e0041}1"});
        let text = printed(serde_json::to_string_pretty(&value).unwrap().as_bytes());
        assert!(text.is_ascii(), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(shorten(&"é".repeat(300)), "é".repeat(300));
        assert_eq!(shorten(&"é".repeat(301)), format!("{}... (602 bytes)", "é".repeat(300)));
    }
}
