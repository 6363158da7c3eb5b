// Gen writes the documents of the contract from its Go types: a JSON Schema per
// event and one AsyncAPI document. It runs in the folder of package schemas:
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
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run() error {
	files, err := documents(".")
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

// documents is every generated file by its name; dir is the folder of package schemas.
func documents(dir string) (map[string][]byte, error) {
	files, err := jsonSchemas(dir)
	if err != nil {
		return nil, err
	}
	files["asyncapi.yaml"], err = asyncAPI()
	return files, err
}
