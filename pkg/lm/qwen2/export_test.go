package qwen2

// CacheInUse is the tokens that pages in use have room for.
func CacheInUse(m *Model) int { return m.cache.pages.InUse() }

// ParseTemplate renders messages in a template.
var ParseTemplate = parseTemplate
