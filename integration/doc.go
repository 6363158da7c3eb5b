// Package integration holds the tests that span packages: whole pipelines, the rules
// of who may import whom, and the promises of the documents.
package integration
