//! Wraps text for a terminal.

use std::fmt::Write;

/// The largest width of a line, in characters.
const WIDTH: usize = 100;

/// Appends one line of text; a long one is wrapped between words. It is indented by `indent`, its continuation lines by `hang`.
pub(crate) fn write_line(page: &mut String, indent: usize, hang: usize, text: &str) {
    let mut column = indent;
    let _ = write!(page, "{:indent$}", "");
    for (index, word) in text.split(' ').enumerate() {
        let length = word.chars().count();
        if index > 0 && column + 1 + length > WIDTH {
            let _ = write!(page, "\n{:hang$}", "");
            column = hang;
        } else if index > 0 {
            page.push(' ');
            column += 1;
        }
        page.push_str(word);
        column += length;
    }
    page.push('\n');
}
