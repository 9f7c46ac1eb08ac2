//! Text for a terminal: lines broken between words. What is said is each command's own.

use std::fmt::Write;

/// Columns that a terminal of any width shows without a break.
const WIDTH: usize = 100;

/// One entry, broken between words; what follows the first line is indented by `hang`.
pub(crate) fn line(page: &mut String, indent: usize, hang: usize, text: &str) {
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
