//! Faults in host code. A copy of the sources has each fault and the original. A variable of the
//! environment chooses the fault, so that one build serves all.

use std::io;
use std::ops::Range;
use std::path::Path;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{BinOp, Expr};

use crate::site::{self, Fault, Kind, Site};
use crate::tree;

/// The line of `bind_all` after which the hook records a kernel.
const BOUND: &str = "later = rest;\n";

/// The variable that chooses a fault.
pub const VARIABLE: &str = "WGPU_ATTENTION_MUTANT";

pub fn sites(file: &str, text: &str) -> Vec<Site> {
    let Ok(parsed) = syn::parse_file(text) else { return vec![] };
    let mut finder = Finder { file, text, sites: Vec::new() };
    finder.visit_file(&parsed);
    site::numbered(finder.sites)
}

struct Finder<'a> {
    file: &'a str,
    text: &'a str,
    sites: Vec<Site>,
}

/// True for items that a test or another platform compiles.
fn is_left_out(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| {
                let text = list.tokens.to_string();
                text == "test" || text.starts_with("target_arch")
            })
    })
}

impl<'a> Visit<'a> for Finder<'_> {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if !is_left_out(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        if item.sig.constness.is_none() && !is_left_out(&item.attrs) {
            self.visit_block(&item.block);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        if item.sig.constness.is_none() && item.sig.ident != "fmt" && !is_left_out(&item.attrs) {
            self.visit_block(&item.block);
        }
    }

    // These hold constants and patterns.
    fn visit_item_const(&mut self, _: &'a syn::ItemConst) {}
    fn visit_impl_item_const(&mut self, _: &'a syn::ImplItemConst) {}
    fn visit_trait_item(&mut self, _: &'a syn::TraitItem) {}
    fn visit_item_static(&mut self, _: &'a syn::ItemStatic) {}
    fn visit_pat(&mut self, _: &'a syn::Pat) {}
    fn visit_type(&mut self, _: &'a syn::Type) {}
    fn visit_path(&mut self, _: &'a syn::Path) {}
    fn visit_attribute(&mut self, _: &'a syn::Attribute) {}

    fn visit_expr(&mut self, expr: &'a Expr) {
        match expr {
            Expr::Repeat(repeat) => return self.visit_expr(&repeat.expr),
            Expr::Binary(binary) => self.binary(binary),
            Expr::MethodCall(call) => self.extremum(call),
            Expr::Lit(literal) => self.literal(literal),
            _ => {}
        }
        visit::visit_expr(self, expr);
    }
}

impl Finder<'_> {
    fn add(&mut self, kind: Kind, expr: &Expr, after: String) {
        self.sites.push(Site::new(self.file, self.text, kind, expr.span().byte_range(), after));
    }

    fn part(&self, range: Range<usize>) -> &str {
        &self.text[range]
    }

    fn binary(&mut self, binary: &syn::ExprBinary) {
        let [left, right] = [&binary.left, &binary.right].map(|side| side.span().byte_range());
        let has_let = [&binary.left, &binary.right].iter().any(|side| has_let(side));
        let other = match binary.op {
            BinOp::Lt(_) => "<=",
            BinOp::Le(_) => "<",
            BinOp::Gt(_) => ">=",
            BinOp::Ge(_) => ">",
            BinOp::Eq(_) => "!=",
            BinOp::Ne(_) => "==",
            BinOp::And(_) if !has_let => "||",
            BinOp::Or(_) => "&&",
            BinOp::Add(_) | BinOp::Div(_) => "*",
            BinOp::Sub(_) | BinOp::Mul(_) => "+",
            BinOp::Rem(_) => "/",
            _ => return,
        };
        let is_bound = matches!(binary.op, BinOp::Lt(_) | BinOp::Le(_) | BinOp::Gt(_) | BinOp::Ge(_));
        let is_arithmetic = ["*", "+", "/"].contains(&other);
        let (a, b) = (self.part(left.clone()).to_string(), self.part(right.clone()).to_string());
        let is_stride = is_arithmetic && format!("{a}{b}").contains("stride");
        let is_mask = self.file.contains("/mask") && !is_arithmetic;
        let kind = match () {
            _ if is_stride => Kind::Stride,
            _ if is_mask && !is_bound => Kind::MaskRule,
            _ if is_bound => Kind::Bound,
            _ => Kind::Operand,
        };
        // Strings and sets have operators too.
        if a.contains('"') || b.contains('"') || a.contains("Features") {
            return;
        }
        let expr = Expr::Binary(binary.clone());
        self.add(kind, &expr, format!("({a}) {other} ({b})"));
        if matches!(binary.op, BinOp::Sub(_)) {
            self.add(kind, &expr, format!("({b}) - ({a})"));
        }
    }

    fn extremum(&mut self, call: &syn::ExprMethodCall) {
        let other = match call.method.to_string().as_str() {
            "min" => "max",
            "max" => "min",
            _ => return,
        };
        if call.args.len() == 1 {
            let expr = Expr::MethodCall(call.clone());
            let (whole, name) = (expr.span().byte_range(), call.method.span().byte_range());
            let after =
                format!("{}{other}{}", self.part(whole.start..name.start), self.part(name.end..whole.end));
            // `ScratchSize` has no minimum.
            if other == "max" || !after.contains("size") {
                self.add(Kind::Bound, &expr, after);
            }
        }
    }

    fn literal(&mut self, literal: &syn::ExprLit) {
        if let syn::Lit::Int(number) = &literal.lit
            && number.suffix().is_empty()
            && let Ok(value) = number.base10_parse::<u64>()
        {
            self.add(Kind::Constant, &Expr::Lit(literal.clone()), (value + 1).to_string());
        }
    }
}

fn has_let(expr: &Expr) -> bool {
    match expr {
        Expr::Let(_) => true,
        Expr::Binary(binary) => has_let(&binary.left) || has_let(&binary.right),
        _ => false,
    }
}

/// Writes a copy of the repository with all `sites`, numbered from 1.
pub fn write_tree(repo: &Path, at: &Path, sites: &[Site]) -> io::Result<()> {
    tree::copy(repo, at, &["src"])?;
    // From the end of each file, so that earlier places stay where they are.
    let mut numbered: Vec<(usize, &Site)> = sites.iter().enumerate().collect();
    numbered.sort_by_key(|(_, site)| std::cmp::Reverse(site.range.start));
    for (n, site) in numbered {
        let Fault { file, before, after, .. } = &site.fault;
        let both = format!("(if crate::mutation::mutant({}) {{ {after} }} else {{ {before} }})", n + 1);
        tree::edit(&at.join(file), |mut text| {
            text.replace_range(site.range.clone(), &both);
            text
        })?;
    }
    let recording = "src/kernel/recording.rs";
    tree::edit(&at.join(recording), |text| {
        text.replacen(BOUND, &format!("{BOUND}crate::mutation::reached_kernel(&dispatch.variant);"), 1)
    })?;
    tree::edit(&at.join("src/lib.rs"), |text| text + include_str!("../hook.rs"))
}
