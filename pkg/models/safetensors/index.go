package safetensors

import (
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"sort"
	"strings"
	"unicode/utf8"
)

// maxShards bounds how many files an index may map.
const maxShards = 4096

// openIndex opens the shards of an index, a JSON object whose weight_map gives the file of every
// tensor. Shards are in the folder of the index. An index that is not valid, too many shards, and
// shards that do not match are errors.
func openIndex(folder *Folder, name string) (*Archive, error) {
	where := folder.where(name)
	text, err := folder.Read(name, MaxHeader)
	if err != nil {
		return nil, fmt.Errorf("open index %q: %w", where, err)
	}
	index, err := parseIndex(text)
	if err != nil {
		return nil, fmt.Errorf("index %q: %w", where, err)
	}
	var shards []string
	seen := map[string]bool{}
	for _, shard := range index {
		if !seen[shard] {
			seen[shard] = true
			shards = append(shards, path.Join(path.Dir(filepath.ToSlash(name)), shard))
		}
	}
	if len(shards) > maxShards {
		return nil, fmt.Errorf("index %q: %d shards, at most %d are allowed", where, len(shards), maxShards)
	}
	sort.Strings(shards)
	a, err := openFiles(folder, shards, index)
	if err != nil {
		return nil, fmt.Errorf("index %q: %w", where, err)
	}
	return a, nil
}

// parseIndex returns the weight_map of an index: the file of every tensor. A name that could lead
// out of the folder, no weight_map and faults of JSON are errors.
func parseIndex(text []byte) (map[string]string, error) {
	if len(text) > MaxHeader {
		return nil, fmt.Errorf("more than %d bytes", MaxHeader)
	}
	var index map[string]string
	if !utf8.Valid(text) {
		return nil, errors.New("not UTF-8")
	}
	p := parser{text: text}
	err := p.readObject(func(key string) error {
		switch key {
		case "metadata": // sizes, for people
			return p.skip()
		case "weight_map":
		default:
			return fmt.Errorf("%.40q: an unknown key; must be weight_map or metadata", key)
		}
		index = map[string]string{}
		return p.readObject(func(name string) error {
			shard, err := p.readString()
			if err != nil {
				return err
			}
			if !strings.HasSuffix(shard, fileSuffix) || strings.ContainsAny(shard, `/\`) || !filepath.IsLocal(shard) {
				return fmt.Errorf("tensor %q: %q is not the name of a shard", name, shard)
			}
			if len(index) == MaxTensors {
				return errTensors
			}
			index[name] = shard
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	if len(index) == 0 {
		return nil, errors.New("no weight_map")
	}
	return index, nil
}
