// Gen writes the documents of the contract from its Go types: a JSON Schema per
// event, one AsyncAPI document, a page of all events, types for TypeScript, and the tables of schemas/README.md. It
// runs in the folder of package schemas:
//
//	go generate ./schemas
//
// Its output depends on nothing but the sources.
package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/meander-rl/meander/schemas/document"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

// run writes the generated files into the current folder.
func run() error {
	files, err := document.Files(".")
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(name, files[name], 0o644); err != nil {
			return err
		}
	}
	return nil
}
